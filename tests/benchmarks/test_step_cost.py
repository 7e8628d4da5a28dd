"""A step's bytes and operations are those of the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.step_cost import Cost, ModelShape, decode_cost, gguf_weight_bytes, prefill_cost

CONFIG = LlamaConfig(
    num_hidden_layers=3,
    hidden_size=192,
    intermediate_size=320,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=640,
    tie_word_embeddings=True,
    attn_implementation="eager",  # the counter sees its products
)
NUM_SEQS, CONTEXT_LEN = 4, 24


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder: Path = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    return ModelShape.read(folder)


def test_a_decode_step_reads_every_matrix_once(model: LlamaForCausalLM, shape: ModelShape) -> None:
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert shape.weight_bytes(2) == 2 * matrices


def test_a_decode_step_reads_the_kv_cache_of_every_sequence(model: LlamaForCausalLM, shape: ModelShape) -> None:
    with torch.inference_mode():
        cache = model(torch.zeros(NUM_SEQS, CONTEXT_LEN, dtype=torch.long), use_cache=True).past_key_values
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    without = decode_cost(shape, 1000, 4, NUM_SEQS, 0)
    assert decode_cost(shape, 1000, 4, NUM_SEQS, CONTEXT_LEN).num_bytes - without.num_bytes == kv_bytes
    assert without.num_bytes == 1000


def test_a_decode_step_computes_what_transformers_computes(model: LlamaForCausalLM, shape: ModelShape) -> None:
    cache = DynamicCache(config=CONFIG)
    with torch.inference_mode():
        model(torch.zeros(NUM_SEQS, CONTEXT_LEN - 1, dtype=torch.long), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(NUM_SEQS, 1, dtype=torch.long), cache=cache)
    cost = decode_cost(shape, 1000, 4, NUM_SEQS, CONTEXT_LEN)
    assert cost.num_operations == pytest.approx(counter.get_total_flops(), rel=0.001)


def test_prefill_computes_what_transformers_computes(model: LlamaForCausalLM, shape: ModelShape) -> None:
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, CONTEXT_LEN, dtype=torch.long), logits_to_keep=1)
    # It computes the products of later keys too, and throws them away.
    thrown_away = shape.attention_operations(1) * CONTEXT_LEN * (CONTEXT_LEN - 1) // 2
    cost = prefill_cost(shape, 1000, 4, 1, CONTEXT_LEN)
    assert cost.num_operations == pytest.approx(counter.get_total_flops() - thrown_away, rel=0.001)


def test_the_bundled_model_costs_what_is_known_of_it() -> None:
    smollm2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152)
    assert smollm2.weight_bytes(2) == pytest.approx(269e6, rel=0.001)
    assert smollm2.kv_bytes_per_token(2) == 23_040


def test_a_limit_is_the_time_to_read_and_to_compute() -> None:
    cost = Cost(num_bytes=40e9, num_operations=300e9)
    assert cost.memory_s(20e9) == 2.0
    assert cost.least_s(20e9, 100e9) == 5.0
    assert cost.intensity == 7.5


@pytest.mark.parametrize("has_output_layer", [True, False])
def test_a_gguf_file_counts_as_it_is_stored(tmp_path: Path, has_output_layer: bool) -> None:
    """Q8_0 stores 32 numbers in 34 bytes."""
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    names = ["token_embd.weight", "blk.0.attn_q.weight", *(["output.weight"] if has_output_layer else [])]
    matrix = gguf.quantize(np.ones((64, 96), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    for name in names:
        writer.add_tensor(name, matrix, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(96, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_weight_bytes(file) == 2 * (64 * 96 // 32 * 34)


def test_sizes_that_a_config_leaves_out_follow_from_the_others(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 100}))
    assert ModelShape.read(tmp_path) == ModelShape(2, 64, 96, 4, 4, 16, 100)
