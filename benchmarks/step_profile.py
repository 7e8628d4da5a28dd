"""Where a decode step of ours goes: its operators one by one, over the model's own weights, in the order of a step.

The engine runs a step in one C++ call that no profiler of Python sees into. Here the same operators are called from
Python in the same order on the same weights, so that each finds its weights where a step finds them: in memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.engines.engine import Weights
from benchmarks.limits import Limits, MemoryReader
from benchmarks.model_files import bundled_gguf, float_folder, gguf_file
from benchmarks.results import StepPart, StepProfile
from benchmarks.step_cost import Cost
from deepinfer_backend.models.gguf_weights import GgufWeights
from deepinfer_backend.models.llama_family import DecoderSpec, decoder_spec
from deepinfer_backend.models.loader import load_config
from deepinfer_backend.models.native_model import NativeModel, pack_linear
from deepinfer_backend.models.safetensors_weights import SafetensorsWeights
from deepinfer_backend.models.weights import GroupedMatrix, WeightSource
from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.ops.paged_attention import AttentionStep
from deepinfer_backend.worker.kv_cache import KVCache

T = TypeVar("T")

QKV = "product: query, key, value"
CACHE = "rotary embedding, write into the cache"
ATTENTION = "attention"
OUTPUT = "product: attention's output"
GATE_UP = "product: gate, up"
DOWN = "product: down"
OUTPUT_LAYER = "product: output layer"
NORMS = "norms, activation"
SAMPLING = "sampling, greedy"

_BLOCK_SIZE = 16
_NUM_STEPS = 7
_NUM_CALLS = 200


class Stopwatch:
    """Seconds of each part of a step, without what it takes to call an operator from Python."""

    def __init__(self, call_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self._call_s = call_s

    def time(self, part: str, operator: Callable[..., T], *args: Any) -> T:
        began_s = time.perf_counter()
        result = operator(*args)
        taken_s = time.perf_counter() - began_s
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, taken_s - self._call_s)
        return result


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Any
    output: Any
    post_attention_norm: torch.Tensor
    gate_up: Any
    down: Any


class StepOperators:
    """A model of the Llama family, operator by operator. Each projection is stored in one format and has no bias."""

    def __init__(self, spec: DecoderSpec, source: WeightSource, dtype: torch.dtype) -> None:
        def packed(*modules: str) -> Any:
            matrices = [source.matrix(f"{module}.weight") for module in modules]
            return pack_linear(
                [each if isinstance(each, GroupedMatrix) else each.to(dtype).contiguous() for each in matrices],
                [None] * len(matrices),
            )

        def vector(module: str) -> torch.Tensor:
            return source.tensor(f"{module}.weight").float().contiguous()

        self._spec = spec
        self._inv_freq = torch.tensor(spec.inv_freq)
        self._embedding = source.tensor("model.embed_tokens.weight").to(dtype)
        self._layers = []
        for index in range(len(spec.windows)):
            layer = f"model.layers.{index}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            self._layers.append(
                _Layer(
                    vector(f"{layer}.input_layernorm"),
                    packed(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                    packed(f"{attention}.o_proj"),
                    vector(f"{layer}.post_attention_layernorm"),
                    packed(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    packed(f"{mlp}.down_proj"),
                )
            )
        self._final_norm = vector("model.norm")
        self._output_layer = packed("model.embed_tokens" if spec.tied else "lm_head")

    def run(self, watch: Stopwatch, batch: DecodeBatch, cache: KVCache) -> torch.Tensor:
        """The logits of one step, [num_seqs, vocab_size]."""
        spec, step = self._spec, batch.step
        query_size, scale = spec.num_heads * spec.head_dim, spec.head_dim**-0.5
        cos, sin = watch.time(NORMS, kernels.rotary_angles, batch.positions, self._inv_freq, spec.rotary_scaling)
        residual = self._embedding[batch.token_ids].float()
        hidden, added_to = residual, None
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            stored = (kept.keys, kept.values, kept.key_scales, kept.value_scales)
            x = watch.time(NORMS, kernels.rms_norm, hidden, layer.input_norm, spec.rms_norm_eps, added_to)
            added_to = residual
            qkv = watch.time(QKV, layer.qkv.forward, x)
            watch.time(CACHE, kernels.write_kv_cache, qkv, spec.num_heads, *stored, step.slot_mapping, cos, sin)
            query = qkv[:, :query_size].view(-1, spec.num_heads, spec.head_dim)
            sequences = (step.block_tables, step.seq_lens, step.query_start_loc)
            attended = watch.time(ATTENTION, kernels.paged_attention, query, *stored, *sequences, scale, 0)
            x = watch.time(OUTPUT, layer.output.forward, attended.flatten(1))
            x = watch.time(NORMS, kernels.rms_norm, x, layer.post_attention_norm, spec.rms_norm_eps, residual)
            x = watch.time(GATE_UP, layer.gate_up.forward, x)
            x = watch.time(NORMS, kernels.silu_mul, x)
            hidden = watch.time(DOWN, layer.down.forward, x)
        x = watch.time(NORMS, kernels.rms_norm, hidden, self._final_norm, spec.rms_norm_eps, residual)
        logits: torch.Tensor = watch.time(OUTPUT_LAYER, self._output_layer.forward, x)
        watch.time(SAMPLING, kernels.sample_tokens, logits, *batch.greedy)
        return logits

    def costs(self, num_seqs: int, context_len: int, kv_bytes: int) -> dict[str, Cost]:
        """Of one step; parts that read and write what the one before them left in the processor's caches cost nothing
        of memory."""
        spec, num_layers = self._spec, len(self._layers)

        def products(linears: list[Any], num_inputs: int) -> Cost:
            multiplied = num_inputs * sum(linear.num_outputs for linear in linears)
            return Cost(sum(linear.num_bytes for linear in linears), 2 * num_seqs * multiplied)

        query_size = spec.num_heads * spec.head_dim
        key_bytes = 2 * num_layers * spec.num_kv_heads * spec.head_dim * kv_bytes
        score_operations = 4 * num_layers * spec.num_heads * spec.head_dim
        return {
            QKV: products([layer.qkv for layer in self._layers], spec.hidden_size),
            CACHE: Cost(num_seqs * key_bytes, 0),
            ATTENTION: Cost(num_seqs * context_len * key_bytes, num_seqs * context_len * score_operations),
            OUTPUT: products([layer.output for layer in self._layers], query_size),
            GATE_UP: products([layer.gate_up for layer in self._layers], spec.hidden_size),
            DOWN: products([layer.down for layer in self._layers], spec.intermediate_size),
            OUTPUT_LAYER: products([self._output_layer], spec.hidden_size),
            NORMS: Cost(0, 0),
            SAMPLING: Cost(0, 0),
        }


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token for each of some sequences of one length."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    step: AttentionStep
    greedy: tuple[torch.Tensor, ...]
    """What `sample_tokens` takes besides the logits."""

    @staticmethod
    def of(num_seqs: int, context_len: int, vocab_size: int) -> DecodeBatch:
        blocks_each = -(-context_len // _BLOCK_SIZE)
        # Block 0 is nobody's.
        block_tables = torch.arange(1, num_seqs * blocks_each + 1, dtype=torch.int32).view(num_seqs, blocks_each)
        last = context_len - 1
        step = AttentionStep(
            block_tables=block_tables,
            seq_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
            query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
            slot_mapping=block_tables[:, last // _BLOCK_SIZE].long() * _BLOCK_SIZE + last % _BLOCK_SIZE,
            max_query_len=1,
            max_seq_len=context_len,
        )
        token_ids = torch.randint(vocab_size, (num_seqs,), generator=torch.Generator().manual_seed(0))
        off = torch.zeros(num_seqs)
        greedy = (off, off, off.int(), torch.ones(num_seqs), off.double(), torch.empty_like(token_ids))
        return DecodeBatch(token_ids, torch.full((num_seqs,), last), step, greedy)


def profile_steps(
    weights: Weights, concurrencies: Sequence[int], context_len: int, limits: Limits, reader: MemoryReader
) -> list[StepProfile]:
    """For each number of streams; medians of some steps, in turn with the same step in one call."""
    spec = decoder_spec(load_config(float_folder()))
    source, dtype = _open_weights(weights), torch.bfloat16 if weights == "bf16" else torch.float32
    cache_dtype = torch.float32 if weights == "f32" else torch.bfloat16
    operators, model = StepOperators(spec, source, dtype), NativeModel(spec, source, dtype, lambda share: None)
    profiles = []
    for num_seqs in concurrencies:
        batch = DecodeBatch.of(num_seqs, context_len, spec.vocab_size)
        cache = KVCache(
            model.layers,
            num_blocks=batch.step.block_tables.numel(),
            block_size=_BLOCK_SIZE,
            dtype=cache_dtype,
            device=torch.device("cpu"),
        )
        bandwidth, call_s = reader.measure(), _call_s()
        watches, wholes_s = [], []
        for _ in range(_NUM_STEPS):
            watches.append(Stopwatch(call_s))
            operators.run(watches[-1], batch, cache)
            began_s = time.perf_counter()
            kernels.sample_tokens(run_whole(model, batch, cache), *batch.greedy)
            wholes_s.append(time.perf_counter() - began_s)
        costs = operators.costs(num_seqs, context_len, cache_dtype.itemsize)
        profiles.append(
            StepProfile(
                weights=weights,
                concurrency=num_seqs,
                bandwidth=bandwidth,
                operations_per_s=limits.operations(weights),
                # The first of each is a warm-up.
                whole_s=statistics.median(wholes_s[1:]),
                parts=[
                    StepPart(name, statistics.median(watch.seconds[name] for watch in watches[1:]), cost)
                    for name, cost in costs.items()
                ],
            )
        )
    return profiles


def run_whole(model: NativeModel, batch: DecodeBatch, cache: KVCache) -> torch.Tensor:
    """The logits of the same step as the engine computes it."""
    rows = torch.arange(len(batch.token_ids))
    model.use_caches(cache.layers)
    return model.forward(batch.token_ids, batch.positions, batch.step, rows).logits


def _open_weights(weights: Weights) -> WeightSource:
    if weights in ("8-bit", "4-bit"):
        return GgufWeights(gguf_file("Q8_0") if weights == "8-bit" else bundled_gguf())
    return SafetensorsWeights(float_folder())


def _call_s() -> float:
    """What it takes to call an operator that has next to nothing to do."""
    nothing = torch.zeros(1, 2)
    durations_s = []
    for _ in range(_NUM_CALLS):
        began_s = time.perf_counter()
        kernels.silu_mul(nothing)
        durations_s.append(time.perf_counter() - began_s)
    return statistics.median(durations_s)
