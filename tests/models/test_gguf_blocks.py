"""Blocks of GGUF tensors taken apart are the weights that gguf's own dequantizers give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from deepinfer_backend.models.gguf_blocks import grouped_matrix, is_grouped

# The places of the float16 numbers in a block.
FLOATS = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
FLOATS["Q6_K"] = [208]


def random_blocks(name: str, num_outputs: int, blocks_in_a_row: int) -> npt.NDArray[np.uint8]:
    """Every bit random, but for the float16 numbers, which are finite, of both signs, now and then subnormal or 0."""
    random = np.random.default_rng(7)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (num_outputs * blocks_in_a_row, size), np.uint8)
    for at in FLOATS[name]:
        values = random.normal(0, 0.02, (blocks.shape[0], 1)) * random.choice([0, 1e-4, 1, 100], (blocks.shape[0], 1))
        blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8)
    return blocks.reshape(num_outputs, -1)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (300, 9)])
@pytest.mark.parametrize("name", FLOATS)
def test_blocks_become_the_weights_that_gguf_dequantizes(name: str, shape: tuple[int, int]) -> None:
    data = random_blocks(name, *shape)
    matrix = grouped_matrix(data, GGMLQuantizationType[name])
    assert torch.equal(matrix.dequantized(), torch.from_numpy(dequantize(data, GGMLQuantizationType[name])))
    assert int(matrix.codes.max()) < 2**matrix.bits


@pytest.mark.parametrize("name", FLOATS)
def test_scales_lose_at_most_half_a_unit_of_float16_when_packed(name: str) -> None:
    matrix = grouped_matrix(random_blocks(name, 40, 8), GGMLQuantizationType[name])
    for exact in (matrix.scales, matrix.offsets):
        if exact is not None:
            assert (exact.half().float() - exact).abs().le(exact.abs() * 2**-11).all()


def test_rows_of_a_larger_file_can_be_read_in_place() -> None:
    data = random_blocks("Q4_K", 12, 2)
    part = grouped_matrix(data[3:7], GGMLQuantizationType.Q4_K)
    assert torch.equal(part.dequantized(), grouped_matrix(data, GGMLQuantizationType.Q4_K).dequantized()[3:7])


def test_types_without_groups_are_told_apart() -> None:
    assert all(is_grouped(GGMLQuantizationType[name]) for name in FLOATS)
    assert not any(is_grouped(GGMLQuantizationType[name]) for name in ("F32", "F16", "BF16", "IQ4_NL", "Q2_K", "TQ1_0"))
