"""A model of the Llama family on our own kernels: its weights packed once, a step one call (csrc/decoder)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.interface import ForwardResult, LayerShape, MediaInputs
from deepinfer_backend.models.llama_family import DecoderSpec
from deepinfer_backend.models.lora import LoraLayers
from deepinfer_backend.models.weights import GroupedMatrix, WeightSource
from deepinfer_backend.ops.kernels import Decoder, PackedLinear
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache
from deepinfer_backend.ops.rank_world import WHOLE, RankShare, TensorGroup
from deepinfer_backend.progress import Advance

_EMBEDDING = "model.embed_tokens"
_OUTPUT_LAYER = "lm_head"

Part = tuple[str, Sequence[int]]
"""Of a merged projection: a module, and the numbers of outputs of what it has side by side."""


class NativeModel:
    """A `Model` whose layers are one C++ object, and no modules that adapters could change.

    embedding, output_layer: its PackedLinears, one and the same where their weights are; output_weight: the latter's
    name in the checkpoint.

    What a forward returns are views of memory that the next one writes again.

    Raises (constructor):
        UnsupportedModelError: a weight is missing or has another shape than the configuration says, or the group's
            ranks cannot share it evenly.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        source: WeightSource,
        dtype: torch.dtype,
        advance: Advance,
        group: TensorGroup | None = None,
    ) -> None:
        """dtype: of matrices that are stored as floats: float32 or bfloat16. group: the ranks of which each has a share
        of every matrix; the logits are right on their leader alone.
        """
        self.max_position_embeddings = spec.max_position_embeddings
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.weight_format = source.quantization or str(dtype).removeprefix("torch.")
        self.lora = LoraLayers(torch.nn.Module(), self.device)
        self.media_encoder = None
        self.spec = spec
        self._group = group
        share = WHOLE if group is None else group.share
        num_kv_heads = _shared_sizes(spec, share).num_kv_heads
        self.layers = [LayerShape(num_kv_heads, spec.head_dim, spec.head_dim)] * len(spec.windows)
        packer = Packer(source, dtype, share)
        self.output_weight = f"{_ends(spec, packer)[1]}.weight"
        self.embedding, self.output_layer = _pack_ends(spec, packer)
        final_norm = packer.vector("model.norm.weight", spec.hidden_size)
        self._decoder = make_decoder(_shared_sizes(spec, share), self.embedding, final_norm, self.output_layer)
        if group is not None:
            self._decoder.use_group(group.name)
        for layer, window in enumerate(spec.windows):
            add_layer(self._decoder, spec, packer, f"model.layers.{layer}", window)
            _trim_heap()
            advance((layer + 1) / len(spec.windows))

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        use_caches(self._decoder, caches)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_indices: torch.Tensor,
        *,
        wants_token_states: bool = False,
        media: MediaInputs | None = None,
    ) -> ForwardResult:
        assert media is None
        embeddings = None
        if self._group is not None:
            token_ids, embeddings = self._sum_embeddings(token_ids, self._group)
        result = run_decoder(
            self._decoder,
            token_ids,
            positions,
            attention,
            logits_indices,
            embeddings=embeddings,
            wants_token_states=wants_token_states,
        )
        if self._group is not None:
            result = dataclasses.replace(result, logits=self._group.gather_columns(result.logits))
        return result

    def _sum_embeddings(self, token_ids: torch.Tensor, group: TensorGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Each rank knows those of its part of the vocabulary. Returns ids in that part, for what others know too."""
        vocabulary = group.share.of(self.vocab_size)
        own_ids = token_ids - vocabulary.start
        is_unknown = (own_ids < 0) | (own_ids >= vocabulary.stop - vocabulary.start)
        own_ids.masked_fill_(is_unknown, 0)
        embeddings = self.embedding.unpack_rows(own_ids)
        embeddings[is_unknown] = 0.0
        group.sum(embeddings)
        return own_ids, embeddings


def use_caches(decoder: Any, caches: Sequence[LayerCache]) -> None:
    decoder.use_caches(
        [cache.keys for cache in caches],
        [cache.values for cache in caches],
        [cache.key_scales for cache in caches if cache.key_scales is not None],
        [cache.value_scales for cache in caches if cache.value_scales is not None],
    )


def run_decoder(
    decoder: Any,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionStep,
    logits_indices: torch.Tensor,
    *,
    embeddings: torch.Tensor | None = None,
    wants_token_states: bool = False,
) -> ForwardResult:
    """embeddings: [num_tokens, hidden_size] float32, in place of the tokens' own."""
    result = decoder.forward(
        token_ids,
        positions,
        attention.block_tables,
        attention.seq_lens,
        attention.query_start_loc,
        attention.slot_mapping,
        logits_indices,
        embeddings,
        wants_token_states,
    )
    return ForwardResult(*result)


class Packer:
    """Takes a model's weights from their source, of the shapes that they must have, as the kernels want them."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, share: RankShare = WHOLE) -> None:
        """share: of each matrix, the part that is taken; shapes are those of the whole."""
        self._source = source
        self._names = source.names()
        self._dtype = dtype
        self._share = share

    def has(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._checked(name, self._source.tensor(name), (size,)).float().contiguous()

    def are_equal(self, name: str, other_name: str) -> bool:
        return torch.equal(self._source.tensor(name), self._source.tensor(other_name))

    def linear(self, parts: Sequence[Part], num_inputs: int, *, has_bias: bool = False) -> list[Any]:
        """The share of the outputs, parts side by side: one PackedLinear for each run of them of one stored format."""
        matrices: list[torch.Tensor | GroupedMatrix] = []
        biases: list[torch.Tensor | None] = []
        for module, sizes in parts:
            matrix = self._matrix(f"{module}.weight", sum(sizes), num_inputs)
            bias = self.vector(f"{module}.bias", sum(sizes)) if has_bias else None
            if self._share != WHOLE:
                outputs = self._shared_outputs(sizes)
                matrix, bias = _some_outputs(matrix, outputs), None if bias is None else bias[outputs]
            matrices.append(matrix)
            biases.append(bias)
        runs = groupby(zip(matrices, biases, strict=True), key=lambda part: _format(part[0]))
        return [pack_linear(*map(list, zip(*run, strict=True))) for _, run in runs]

    def summed_linear(self, module: str, num_outputs: int, num_inputs: int, *, has_bias: bool) -> list[Any]:
        """The share of the inputs, so that the ranks' results add up to those of the whole."""
        name = f"{module}.weight"
        matrix = self._matrix(name, num_outputs, num_inputs)
        bias = self.vector(f"{module}.bias", num_outputs) if has_bias and self._share.rank == 0 else None
        if self._share != WHOLE:
            matrix = _some_inputs(name, matrix, self._share)
        return [pack_linear([matrix], [bias])]

    def _shared_outputs(self, sizes: Sequence[int]) -> torch.Tensor:
        outputs, begin = [], 0
        for size in sizes:
            outputs.append(torch.arange(begin, begin + size)[self._share.of(size)])
            begin += size
        return torch.cat(outputs)

    def some_outputs(self, name: str, outputs: torch.Tensor, num_outputs: int, num_inputs: int) -> Any:
        """One PackedLinear of these outputs, [num_rows] int64, of a matrix that has more."""
        return pack_linear([_some_outputs(self._matrix(name, num_outputs, num_inputs), outputs)], [None])

    def _matrix(self, name: str, num_outputs: int, num_inputs: int) -> torch.Tensor | GroupedMatrix:
        matrix = self._source.matrix(name)
        if isinstance(matrix, GroupedMatrix):
            self._checked(name, matrix.codes, (num_outputs, num_inputs))
            return matrix
        return self._checked(name, matrix, (num_outputs, num_inputs)).to(self._dtype).contiguous()

    @staticmethod
    def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(tensor.shape) != shape:
            raise UnsupportedModelError(f"weight {name} has shape {list(tensor.shape)}: must be {list(shape)}")
        return tensor


def make_decoder(spec: DecoderSpec, embedding: Any, final_norm: torch.Tensor, output_layer: Any) -> Any:
    """A Decoder without layers."""
    return Decoder(
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.head_dim**-0.5,
        torch.tensor(spec.inv_freq, dtype=torch.float32),
        spec.rotary_scaling,
        spec.rms_norm_eps,
        embedding,
        final_norm,
        [output_layer],
    )


def _pack_ends(spec: DecoderSpec, packer: Packer) -> tuple[Any, Any]:
    """The embedding and the output layer."""
    embedding_module, output_module = _ends(spec, packer)
    (embedding,) = packer.linear([(embedding_module, [spec.vocab_size])], spec.hidden_size)
    if output_module == embedding_module:
        return embedding, embedding
    (output_layer,) = packer.linear([(output_module, [spec.vocab_size])], spec.hidden_size)
    return embedding, output_layer


def _ends(spec: DecoderSpec, packer: Packer) -> tuple[str, str]:
    """The modules whose weights are the embedding's and the output layer's.

    A model that ties them stores one of the two; one that stores both, and not the same, does not tie them, whatever
    its configuration says (transformers reads it so).
    """
    if not spec.tied:
        return _EMBEDDING, _OUTPUT_LAYER
    if not packer.has(f"{_OUTPUT_LAYER}.weight"):
        return _EMBEDDING, _EMBEDDING
    if not packer.has(f"{_EMBEDDING}.weight"):
        return _OUTPUT_LAYER, _OUTPUT_LAYER
    are_equal = packer.are_equal(f"{_EMBEDDING}.weight", f"{_OUTPUT_LAYER}.weight")
    return _EMBEDDING, _EMBEDDING if are_equal else _OUTPUT_LAYER


def add_layer(decoder: Any, spec: DecoderSpec, packer: Packer, prefix: str, window: int) -> None:
    """prefix: of the layer's weights; window: keys that a query sees, 0 for all."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.merged:
        query_key_value: list[Part] = [(f"{attention}.qkv_proj", [query_size, key_size, key_size])]
        gate_up: list[Part] = [(f"{mlp}.gate_up_proj", [spec.intermediate_size] * 2)]
    else:
        query_key_value = [
            (f"{attention}.q_proj", [query_size]),
            (f"{attention}.k_proj", [key_size]),
            (f"{attention}.v_proj", [key_size]),
        ]
        gate_up = [(f"{mlp}.gate_proj", [spec.intermediate_size]), (f"{mlp}.up_proj", [spec.intermediate_size])]
    decoder.add_layer(
        packer.linear(query_key_value, spec.hidden_size, has_bias=spec.query_key_value_bias),
        packer.summed_linear(f"{attention}.o_proj", spec.hidden_size, query_size, has_bias=spec.output_bias),
        packer.linear(gate_up, spec.hidden_size, has_bias=spec.mlp_bias),
        packer.summed_linear(f"{mlp}.down_proj", spec.hidden_size, spec.intermediate_size, has_bias=spec.mlp_bias),
        packer.vector(f"{prefix}.input_layernorm.weight", spec.hidden_size),
        packer.vector(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
        packer.vector(f"{attention}.q_norm.weight", spec.head_dim) if spec.head_norms else None,
        packer.vector(f"{attention}.k_norm.weight", spec.head_dim) if spec.head_norms else None,
        window,
    )


def _trim_heap() -> None:
    """Gives the system what packing a layer freed: glibc keeps it, up to as much again as the weights are large."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


def _shared_sizes(spec: DecoderSpec, share: RankShare) -> DecoderSpec:
    """What the spec of a rank's own decoder says."""
    shared = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    for name in shared:
        if getattr(spec, name) % share.size:
            raise UnsupportedModelError(
                f"tensor_parallel_size is {share.size}: the model's {name}, {getattr(spec, name)}, must be a multiple "
                "of it"
            )
    return dataclasses.replace(spec, **{name: getattr(spec, name) // share.size for name in shared})


def _some_outputs(matrix: torch.Tensor | GroupedMatrix, outputs: torch.Tensor) -> torch.Tensor | GroupedMatrix:
    if not isinstance(matrix, GroupedMatrix):
        return matrix[outputs]
    offsets = None if matrix.offsets is None else matrix.offsets[outputs]
    return dataclasses.replace(matrix, codes=matrix.codes[outputs], scales=matrix.scales[outputs], offsets=offsets)


def _some_inputs(name: str, matrix: torch.Tensor | GroupedMatrix, share: RankShare) -> torch.Tensor | GroupedMatrix:
    if not isinstance(matrix, GroupedMatrix):
        return matrix[:, share.of(matrix.shape[1])].contiguous()
    num_groups = matrix.scales.shape[1]
    if num_groups % share.size:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {share.size}: the weights of {name} are stored in {num_groups} groups of "
            f"{matrix.group_size}, which must be a multiple of it"
        )
    groups = share.of(num_groups)
    return dataclasses.replace(
        matrix,
        codes=matrix.codes[:, share.of(matrix.codes.shape[1])].contiguous(),
        scales=matrix.scales[:, groups].contiguous(),
        offsets=None if matrix.offsets is None else matrix.offsets[:, groups].contiguous(),
    )


def _format(matrix: torch.Tensor | GroupedMatrix) -> tuple[int, int] | None:
    """What matrices have in common that can be packed as one."""
    return (matrix.bits, matrix.group_size) if isinstance(matrix, GroupedMatrix) else None


def pack_linear(matrices: list[torch.Tensor | GroupedMatrix], biases: list[torch.Tensor | None]) -> Any:
    """The PackedLinear of matrices of one format side by side, floats of one type and contiguous."""
    grouped = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    if not grouped:
        return PackedLinear(matrices, biases)
    return PackedLinear.from_groups(
        grouped[0].bits,
        [matrix.codes for matrix in grouped],
        [matrix.scales for matrix in grouped],
        [matrix.offsets for matrix in grouped],
        biases,
    )
