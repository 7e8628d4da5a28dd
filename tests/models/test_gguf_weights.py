"""Weights read from a GGUF file as they are stored are those that transformers dequantizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.gguf_header import read_gguf_header
from deepinfer_backend.models.gguf_weights import GgufWeights, why_unreadable
from deepinfer_backend.models.weights import GroupedMatrix
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf

QUANTIZATIONS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
FLOATS = ("F32", "F16", "BF16")


def weights_of_transformers(gguf: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("quantization", [*FLOATS, *QUANTIZATIONS])
def test_weights_of_every_type_equal_those_of_transformers(tmp_path: Path, quantization: str) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", quantization=quantization)
    weights, expected = GgufWeights(gguf), weights_of_transformers(gguf)
    assert weights.names() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights.tensor(name).float(), weight), name
    assert weights.quantization == (None if quantization in FLOATS else quantization)
    matrix = weights.matrix("model.layers.1.self_attn.k_proj.weight")
    assert isinstance(matrix, GroupedMatrix) == (quantization not in FLOATS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_of_every_architecture_equal_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture, quantization="Q4_1")
    weights, expected = GgufWeights(gguf), weights_of_transformers(gguf)
    assert weights.names() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights.tensor(name), weight), name


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    weights = GgufWeights(write_tiny_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf lacks the model's weight model\.layers\.7"):
        weights.matrix("model.layers.7.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("stored", "other", "reason"),
    [
        (b"llama", b"gemma", "its architecture gemma is none of llama, qwen2, qwen3, phi3"),
        (b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight", "llama with a tensor blk.1.ffn_dawn.weight is not known"),
    ],
)
def test_other_models_are_told_apart(tmp_path: Path, stored: bytes, other: bytes, reason: str) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_0")
    gguf.write_bytes(gguf.read_bytes().replace(stored, other))
    told = why_unreadable(read_gguf_header(gguf))
    assert told is not None
    assert reason in told
    with pytest.raises(UnsupportedModelError, match="cannot be run as it is stored"):
        GgufWeights(gguf)


def test_types_that_are_only_dequantized_are_told_apart(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", quantization="TQ2_0")
    assert "the type TQ2_0 of its tensor token_embd.weight" in str(why_unreadable(read_gguf_header(gguf)))


def test_a_file_cut_off_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    content = gguf.read_bytes()
    for num_bytes in (*range(0, 12_000, 37), len(content) // 2, len(content) - 4):
        gguf.write_bytes(content[:num_bytes])
        with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf") as refusal:
            read_gguf_header(gguf)
        assert "\n" not in refusal.value.message


def test_damaged_headers_are_refused_or_read_but_never_end_otherwise(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    content = gguf.read_bytes()
    generator = torch.Generator().manual_seed(3)
    for place in torch.randint(4, 9_000, (300,), generator=generator).tolist():
        damaged = bytearray(content)
        damaged[place : place + 8] = b"\xff" * 8
        gguf.write_bytes(damaged)
        try:
            header = read_gguf_header(gguf)
        except UnsupportedModelError:
            continue
        for tensor in header.tensors.values():
            assert 0 <= tensor.offset <= len(content) - tensor.num_bytes
