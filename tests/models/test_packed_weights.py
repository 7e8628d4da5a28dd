"""What GPTQ and AWQ packed comes out as the weights that went in; what we cannot unpack is refused by name.

The packing here is written from its definition, one code at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.packed_weights import packed_weights
from deepinfer_backend.models.weights import GroupedMatrix

NUM_INPUTS, NUM_OUTPUTS = 128, 24
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class StoredTensors(dict[str, torch.Tensor]):
    """A WeightSource of tensors in memory."""

    quantization: str | None = None

    def names(self) -> frozenset[str]:
        return frozenset(self)

    def tensor(self, name: str) -> torch.Tensor:
        return self[name]

    matrix = tensor


class RandomMatrix:
    """Codes [NUM_INPUTS, NUM_OUTPUTS], scales and zero points [num_groups, NUM_OUTPUTS], and what they mean."""

    def __init__(self, bits: int, group_size: int, *, symmetric: bool = False) -> None:
        generator = torch.Generator().manual_seed(bits + group_size)
        num_groups = NUM_INPUTS // group_size

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(2**bits, shape, generator=generator)

        self.codes = codes(NUM_INPUTS, NUM_OUTPUTS)
        self.zeros = codes(num_groups, NUM_OUTPUTS)
        self.zeros[0, :2] = torch.tensor([0, 2**bits - 1])
        if symmetric:
            self.zeros[:] = 2 ** (bits - 1)
        self.scales = torch.rand(num_groups, NUM_OUTPUTS, generator=generator).half()

    def weight(self) -> torch.Tensor:
        """[NUM_OUTPUTS, NUM_INPUTS] float32."""
        group_size = NUM_INPUTS // self.zeros.shape[0]
        weight = torch.empty(NUM_OUTPUTS, NUM_INPUTS)
        for row in range(NUM_INPUTS):
            group = row // group_size
            weight[:, row] = self.scales[group].float() * (self.codes[row] - self.zeros[group])
        return weight


def int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Consecutive rows share an int32, the first in the lowest bits."""
    per_word = 32 // bits
    packed = torch.empty(codes.shape[0] // per_word, codes.shape[1], dtype=torch.int32)
    for row in range(packed.shape[0]):
        for column in range(packed.shape[1]):
            word = 0
            for place in range(per_word):
                word |= int(codes[row * per_word + place, column]) << bits * place
            packed[row, column] = int32(word)
    return packed


def pack_columns(codes: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Consecutive columns share an int32; order[i]: which of them has the i-th lowest bits."""
    per_word = 32 // bits
    packed = torch.empty(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int32)
    for row in range(packed.shape[0]):
        for column in range(packed.shape[1]):
            word = 0
            for place in range(per_word):
                word |= int(codes[row, column * per_word + order[place]]) << bits * place
            packed[row, column] = int32(word)
    return packed


def gptq_tensors(matrix: RandomMatrix, bits: int, *, zeros_are_one_less: bool = True) -> StoredTensors:
    stored_zeros = (matrix.zeros - 1) % 2**bits if zeros_are_one_less else matrix.zeros
    return StoredTensors(
        {
            "proj.qweight": pack_rows(matrix.codes, bits),
            "proj.qzeros": pack_columns(stored_zeros, bits, list(range(32 // bits))),
            "proj.scales": matrix.scales,
            "proj.g_idx": torch.arange(NUM_INPUTS, dtype=torch.int32) // (NUM_INPUTS // matrix.zeros.shape[0]),
            "proj.bias": torch.arange(NUM_OUTPUTS).float(),
            "norm.weight": torch.ones(4),
        }
    )


def awq_tensors(matrix: RandomMatrix) -> StoredTensors:
    return StoredTensors(
        {
            "proj.qweight": pack_columns(matrix.codes, 4, AWQ_ORDER),
            "proj.qzeros": pack_columns(matrix.zeros, 4, AWQ_ORDER),
            "proj.scales": matrix.scales,
            "norm.weight": torch.ones(4),
        }
    )


def unpacked(stored: StoredTensors, config: dict[str, Any]) -> GroupedMatrix:
    matrix = packed_weights(stored, config).matrix("proj.weight")
    assert isinstance(matrix, GroupedMatrix)
    assert matrix.codes.is_contiguous()
    return matrix


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [16, 32, 64, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_is_what_was_packed(bits: int, group_size: int, checkpoint_format: str) -> None:
    matrix = RandomMatrix(bits, NUM_INPUTS if group_size == -1 else group_size)
    stored = gptq_tensors(matrix, bits, zeros_are_one_less=checkpoint_format == "gptq")
    config = {**GPTQ, "bits": bits, "group_size": group_size, "checkpoint_format": checkpoint_format}
    grouped = unpacked(stored, config)
    assert grouped.bits == bits
    assert torch.equal(grouped.dequantized(), matrix.weight())


@pytest.mark.parametrize("group_size", [16, 32, 128, -1])
def test_awq_is_what_was_packed(group_size: int) -> None:
    matrix = RandomMatrix(4, NUM_INPUTS if group_size == -1 else group_size)
    grouped = unpacked(awq_tensors(matrix), {**AWQ, "group_size": group_size, "version": "GEMM"})
    assert torch.equal(grouped.dequantized(), matrix.weight())


def test_symmetric_weights_need_no_offsets() -> None:
    matrix = RandomMatrix(4, 32, symmetric=True)
    for grouped in (unpacked(gptq_tensors(matrix, 4), GPTQ), unpacked(awq_tensors(matrix), AWQ)):
        assert grouped.offsets is None
        assert torch.equal(grouped.dequantized(), matrix.weight())


def test_what_is_not_packed_is_as_it_was() -> None:
    stored = gptq_tensors(RandomMatrix(4, 32), 4)
    weights = packed_weights(stored, GPTQ)
    assert weights.names() == {"proj.weight", "proj.bias", "norm.weight"}
    assert weights.tensor("proj.bias") is stored["proj.bias"]
    assert weights.matrix("norm.weight") is stored["norm.weight"]
    assert torch.equal(weights.tensor("proj.weight"), unpacked(stored, GPTQ).dequantized())
    assert weights.quantization == "GPTQ-4bit"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'.* must be gptq or awq"),
        ({**GPTQ, "bits": 3}, "bits is 3.* must be 4 or 8"),
        ({**GPTQ, "bits": None}, "bits is None"),
        ({**GPTQ, "group_size": 24}, "group_size is 24.* must be -1, 16 or a multiple of 32"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**GPTQ, "group_size": None}, "group_size is None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'.* must be gptq or gptq_v2"),
        ({**GPTQ, "format": "bitblas"}, "format is 'bitblas'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic is .* must be left out"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype is 'int16'.* must be int32"),
        ({**AWQ, "bits": 8}, "bits is 8.* must be 4"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'.* must be gemm"),
        ({**AWQ, "zero_point": False}, "zero_point is False.* must be true"),
    ],
)
def test_what_cannot_be_unpacked_is_refused_with_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        packed_weights(StoredTensors(), config)


def test_inputs_scattered_over_the_groups_are_refused() -> None:
    stored = gptq_tensors(RandomMatrix(4, 32), 4)
    stored["proj.g_idx"] = stored["proj.g_idx"].flip(0)
    with pytest.raises(UnsupportedModelError, match=r"desc_act: proj\.g_idx scatters"):
        unpacked(stored, {**GPTQ, "desc_act": True})


def test_tensors_of_other_shapes_are_named() -> None:
    stored = gptq_tensors(RandomMatrix(4, 32), 4)
    with pytest.raises(UnsupportedModelError, match=r"proj: scales .* do not belong to a qweight"):
        unpacked(stored, {**GPTQ, "group_size": 64})
    stored["proj.qweight"] = stored["proj.qweight"].to(torch.int16)
    with pytest.raises(UnsupportedModelError, match=r"proj\.qweight is torch\.int16"):
        unpacked(stored, GPTQ)
