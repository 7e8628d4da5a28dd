"""The operators that are timed one by one are those of a step, and what they cost is what a step costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.report import markdown_report
from benchmarks.results import StepPart, StepProfile
from benchmarks.step_cost import ModelShape, decode_cost
from benchmarks.step_profile import DecodeBatch, StepOperators, Stopwatch, run_whole
from deepinfer_backend.models.llama_family import decoder_spec
from deepinfer_backend.models.loader import load_config
from deepinfer_backend.models.native_model import NativeModel
from deepinfer_backend.models.safetensors_weights import SafetensorsWeights
from deepinfer_backend.worker.kv_cache import KVCache
from tests.benchmarks.test_results import make_results
from tests.support.models import make_random_model

NUM_SEQS, CONTEXT_LEN = 3, 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_parts_of_a_step_give_its_logits_and_cost_what_it_costs(
    folder: Path, dtype: torch.dtype, bytes_each: int
) -> None:
    spec, source = decoder_spec(load_config(folder)), SafetensorsWeights(folder)
    operators, model = StepOperators(spec, source, dtype), NativeModel(spec, source, dtype, lambda share: None)
    batch = DecodeBatch.of(NUM_SEQS, CONTEXT_LEN, spec.vocab_size)
    device = torch.device("cpu")
    cache = KVCache(model.layers, num_blocks=6, block_size=16, dtype=torch.float32, device=device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    watch = Stopwatch(call_s=0.0)
    logits = operators.run(watch, batch, cache)
    torch.testing.assert_close(logits, run_whole(model, batch, cache), rtol=0, atol=0)

    costs = operators.costs(NUM_SEQS, CONTEXT_LEN, kv_bytes=4)
    assert costs.keys() == watch.seconds.keys()
    shape = ModelShape.read(folder)
    step = decode_cost(shape, shape.weight_bytes(bytes_each), 4, NUM_SEQS, CONTEXT_LEN)
    assert sum(cost.num_operations for cost in costs.values()) == step.num_operations
    # Packed columns are filled up, and a step writes the keys and values of its tokens.
    assert sum(cost.num_bytes for cost in costs.values()) >= step.num_bytes + NUM_SEQS * shape.kv_bytes_per_token(4)


def test_a_report_sets_the_parts_of_a_step_beside_the_limits() -> None:
    results = make_results()
    for streams, seconds in ((1, 0.004), (8, 0.008)):
        part = StepPart("attention", seconds, decode_cost(SHAPE, 0.08e9, 4, streams, 64))
        results.profiles.append(StepProfile("bf16", streams, 40e9, 800e9, whole_s=0.02, parts=[part]))
    report = markdown_report(results)
    memory = 0.08 / 40 / 0.004
    assert f"| attention | 4.00 | {memory:.2f} |" in report
    assert "| the same step in one call | 20.0 |" in report


SHAPE = ModelShape(
    num_layers=0, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=8
)
