"""The quantized blocks of GGUF tensors, taken apart into codes, scales and offsets without dequantizing them.

Block layouts: ggml's `ggml-common.h`. Numbers of 4 bits lie two to a byte, low half first; the halves of one stretch of
bytes hold consecutive stretches of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from deepinfer_backend.models.weights import GroupedMatrix

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Floats: TypeAlias = npt.NDArray[np.float32]
_Parts: TypeAlias = tuple[_Floats, _Floats | None]
"""Scales and offsets of the groups of some blocks, [num_blocks, groups in a block]."""

_SLAB_BYTES = 1 << 18
"""Blocks are taken apart so many bytes at a time, that what lies between stays in the processor's cache."""


def is_grouped(quantization: int) -> bool:
    """Whether `grouped_matrix` reads this type of GGUF tensor (a `gguf.GGMLQuantizationType`)."""
    return quantization in _FORMATS


def grouped_matrix(data: npt.NDArray[np.uint8], quantization: int) -> GroupedMatrix:
    """The weight whose blocks are `data` [num_outputs, bytes of a row] uint8, as `gguf.GGUFReader` gives it.

    Types of 5 bits become codes of 6. Scales are float32 and exact: the product of a block's float16 scale and a
    group's integer one has at most 18 bits.
    """
    layout = _FORMATS[quantization]
    block_inputs, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(quantization)]
    num_outputs = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    num_blocks, num_groups = blocks.shape[0], block_inputs // layout.group_size
    codes = np.empty((num_blocks, block_inputs), np.uint8)
    scales = np.empty((num_blocks, num_groups), np.float32)
    offsets = np.empty((num_blocks, num_groups), np.float32) if layout.has_offsets else None
    slab = _SLAB_BYTES // block_bytes
    for first in range(0, num_blocks, slab):
        part = slice(first, first + slab)
        scales[part], part_offsets = layout.take_apart(blocks[part], codes[part])
        if offsets is not None and part_offsets is not None:
            offsets[part] = part_offsets
    return GroupedMatrix(
        bits=layout.bits,
        group_size=layout.group_size,
        codes=torch.from_numpy(codes.reshape(num_outputs, -1)),
        scales=torch.from_numpy(scales.reshape(num_outputs, -1)),
        offsets=None if offsets is None else torch.from_numpy(offsets.reshape(num_outputs, -1)),
    )


@dataclass(frozen=True, slots=True)
class _Format:
    bits: int
    group_size: int
    has_offsets: bool
    take_apart: Callable[[_Bytes, _Bytes], _Parts]
    """Writes the codes of blocks [num_blocks, bytes of a block] and returns their scales and offsets."""


def _q4_0(blocks: _Bytes, codes: _Bytes) -> _Parts:
    _write_nibbles(blocks[:, 2:], codes)
    return _float16(blocks, 0), None


def _q4_1(blocks: _Bytes, codes: _Bytes) -> _Parts:
    _write_nibbles(blocks[:, 4:], codes)
    return _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: _Bytes, codes: _Bytes) -> _Parts:
    # The code 16 means 0, which a code of 6 bits without an offset writes as 32.
    _write_nibbles(blocks[:, 6:], codes)
    codes += _single_bits(blocks[:, 2:6]) * np.uint8(16) + np.uint8(16)
    return _float16(blocks, 0), None


def _q5_1(blocks: _Bytes, codes: _Bytes) -> _Parts:
    _write_nibbles(blocks[:, 8:], codes)
    codes += _single_bits(blocks[:, 4:8]) * np.uint8(16)
    return _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: _Bytes, codes: _Bytes) -> _Parts:
    # From signed to 128 more than that: the highest bit turns over.
    np.bitwise_xor(_words(blocks[:, 2:]), _every_byte(0x80), out=codes.view(np.uint64))
    return _float16(blocks, 0), None


def _q4_k(blocks: _Bytes, codes: _Bytes) -> _Parts:
    for stretch in range(4):
        _write_nibbles(blocks[:, 16 + 32 * stretch : 48 + 32 * stretch], codes[:, 64 * stretch : 64 * stretch + 64])
    return _k_scales(blocks)


def _q5_k(blocks: _Bytes, codes: _Bytes) -> _Parts:
    # Bit i of byte j is the fifth bit of input j in the block's group i.
    high = _words(blocks[:, 16:48])
    for group in range(8):
        low = _words(blocks[:, 48 + group // 2 * 32 : 80 + group // 2 * 32])
        inputs = codes[:, 32 * group : 32 * group + 32].view(np.uint64)
        np.bitwise_and(low >> np.uint64(group % 2 * 4), _every_byte(0x0F), out=inputs)
        inputs |= (high >> np.uint64(group) & _every_byte(0x01)) << np.uint64(4)
    return _k_scales(blocks)


def _q6_k(blocks: _Bytes, codes: _Bytes) -> _Parts:
    # In each half of the block, 64 bytes hold the low 4 bits of its 128 inputs, and 32 bytes their high 2 bits.
    for half in range(2):
        high = _words(blocks[:, 128 + 32 * half : 160 + 32 * half])
        for quarter in range(4):
            start = 64 * half + quarter % 2 * 32
            low = _words(blocks[:, start : start + 32])
            start = 128 * half + 32 * quarter
            inputs = codes[:, start : start + 32].view(np.uint64)
            np.bitwise_and(low >> np.uint64(quarter // 2 * 4), _every_byte(0x0F), out=inputs)
            inputs |= (high >> np.uint64(2 * quarter) & _every_byte(0x03)) << np.uint64(4)
    group_scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _float16(blocks, 208) * group_scales, None


def _k_scales(blocks: _Bytes) -> _Parts:
    """Scales and offsets of Q4_K and Q5_K: 6 bits each for 8 groups in 12 bytes, times the block's two float16.

    Bytes 0 to 3 and 4 to 7: the scales and minima of groups 0 to 3 in their low 6 bits, the high 2 bits of those of
    groups 4 to 7 above; bytes 8 to 11: the low 4 bits of the latter, two to a byte.
    """
    scales, minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six_bits = np.uint8(0x3F)
    all_scales = np.concatenate([scales & six_bits, low & np.uint8(0x0F) | scales >> 6 << 4], axis=1)
    all_minima = np.concatenate([minima & six_bits, low >> 4 | minima >> 6 << 4], axis=1)
    return _float16(blocks, 0) * all_scales.astype(np.float32), -_float16(blocks, 2) * all_minima.astype(np.float32)


def _write_nibbles(packed: _Bytes, codes: _Bytes) -> None:
    """codes [num_blocks, 2 n]: the low halves of packed [num_blocks, n], then the high ones."""
    size = packed.shape[1]
    words = _words(packed)
    np.bitwise_and(words, _every_byte(0x0F), out=codes[:, :size].view(np.uint64))
    np.bitwise_and(words >> np.uint64(4), _every_byte(0x0F), out=codes[:, size:].view(np.uint64))


def _single_bits(packed: _Bytes) -> _Bytes:
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def _float16(blocks: _Bytes, at: int) -> _Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _words(packed: _Bytes) -> npt.NDArray[np.uint64]:
    """The bytes eight at a time: numpy's loops over a block's few inputs are then short."""
    return np.ascontiguousarray(packed).view(np.uint64)


def _every_byte(value: int) -> np.uint64:
    return np.uint64(value * 0x0101010101010101)


_FORMATS: dict[Any, _Format] = {
    GGMLQuantizationType.Q4_0: _Format(4, 32, False, _q4_0),
    GGMLQuantizationType.Q4_1: _Format(4, 32, True, _q4_1),
    GGMLQuantizationType.Q5_0: _Format(6, 32, False, _q5_0),
    GGMLQuantizationType.Q5_1: _Format(6, 32, True, _q5_1),
    GGMLQuantizationType.Q8_0: _Format(8, 32, False, _q8_0),
    GGMLQuantizationType.Q4_K: _Format(4, 32, True, _q4_k),
    GGMLQuantizationType.Q5_K: _Format(6, 32, True, _q5_k),
    GGMLQuantizationType.Q6_K: _Format(6, 16, False, _q6_k),
}
