"""The header of a GGUF file: what it says about its model, and where its tensors lie.

The `gguf` package's reader makes an object of every token of the vocabulary, which takes seconds; this one steps over
them. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.model_files import check_gguf, one_line

Scalar: TypeAlias = str | int | float | bool

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_NUMBERS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: outermost dimension first, as torch counts; offset: from the beginning of the file."""

    quantization: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: without the arrays, which are the tokenizer's."""

    metadata: dict[str, Scalar]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def read_gguf_header(path: Path) -> GgufHeader:
    """Every tensor that it names lies within the file.

    Raises:
        UnsupportedModelError: the file is damaged, or of a version or with a tensor type that is not known.
    """
    check_gguf(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (struct.error, ValueError, LookupError, ArithmeticError) as error:
        raise UnsupportedModelError(f"{path} cannot be read; it is damaged or incomplete: {one_line(error)}") from error


class _Reader:
    """Walks over the header once; `struct` raises where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = len(b"GGUF")

    def header(self) -> GgufHeader:
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version {version}: must be one of {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_values = self._unpack("<QQ")
        metadata: dict[str, Scalar] = {}
        for _ in range(num_values):
            name = self._string()
            value = self._value()
            if value is not None:
                metadata[name] = value
        directory = [(self._string(), self._tensor()) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        data_start = -(-self._position // alignment) * alignment
        tensors = {name: replace(tensor, offset=data_start + tensor.offset) for name, tensor in directory}
        for name, tensor in tensors.items():
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise ValueError(f"tensor {name!r} reaches beyond the end of the file")
        return GgufHeader(metadata, tensors)

    def _tensor(self) -> GgufTensor:
        """offset: from the end of the header, as the file has it."""
        (num_dimensions,) = self._unpack("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        shape = self._unpack(f"<{num_dimensions}Q")[::-1]
        type_id, offset = self._unpack("<IQ")
        quantization = GGMLQuantizationType(type_id)
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
        if shape[-1] % block_size:
            raise ValueError(f"a tensor has rows of {shape[-1]}, which are not whole blocks of {block_size}")
        return GgufTensor(quantization, shape, offset, math.prod(shape) // block_size * block_bytes)

    def _value(self) -> Scalar | None:
        """None for an array, which is skipped."""
        (kind,) = self._unpack("<I")
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            self._skip_array()
            return None
        (value,) = self._unpack(_NUMBERS[GGUFValueType(kind)])
        assert isinstance(value, (int, float))
        return value

    def _skip_array(self) -> None:
        kind, num_items = self._unpack("<IQ")
        if kind == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        if kind != GGUFValueType.STRING:
            self._position += num_items * struct.calcsize(_NUMBERS[GGUFValueType(kind)])
            return
        data, position, length_of = self._data, self._position, struct.Struct("<Q").unpack_from
        for _ in range(num_items):
            position += 8 + length_of(data, position)[0]
        self._position = position

    def _string(self) -> str:
        (num_bytes,) = self._unpack("<Q")
        start, self._position = self._position, self._position + num_bytes
        if self._position > len(self._data):
            raise ValueError("a string reaches beyond the end of the file")
        return self._data[start : self._position].decode("utf-8")

    def _unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values
