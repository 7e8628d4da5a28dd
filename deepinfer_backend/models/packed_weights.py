"""The weights of GPTQ and AWQ folders: codes of 4 or 8 bits, several of them in each int32.

Both store a layer's matrix as `qweight`, [num_inputs, num_outputs], with a scale and a zero point for each group of
inputs and each output: weight = scale * (code - zero). What shares an int32 lies along the inputs in GPTQ's qweight,
along the outputs in AWQ's and in both methods' `qzeros`. The layouts are those of AutoGPTQ, GPTQModel and AutoAWQ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_backend.errors import UnsupportedModelError, shown
from deepinfer_backend.models.weights import GroupedMatrix, WeightSource

PACKED_METHODS = ("gptq", "awq")

_PACKED_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_WEIGHT_SUFFIX = ".weight"
# Which of eight neighbouring outputs AWQ puts into each four bits of an int32, the lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BYTES_OF_INT32 = 4


def packed_weights(stored: WeightSource, quantization_config: Mapping[str, Any]) -> PackedWeights:
    """The weights of a folder whose config.json has this quantization_config and whose tensors are `stored`.

    Raises:
        UnsupportedModelError: naming a field and what is supported there.
    """
    method = quantization_config.get("quant_method")
    if method not in PACKED_METHODS:
        raise _unsupported("quant_method", method, " or ".join(PACKED_METHODS))
    return (GptqWeights if method == "gptq" else AwqWeights)(stored, quantization_config)


class PackedWeights(ABC):
    """A WeightSource over tensors of which some are packed: `X.qweight` and its kin are the matrix `X.weight`."""

    def __init__(self, stored: WeightSource, method: str, bits: int, group_size: object) -> None:
        # The kernels multiply whole groups of 16 or of a multiple of 32 inputs.
        if type(group_size) is not int or not (group_size in (-1, 16) or (group_size > 0 and group_size % 32 == 0)):
            raise _unsupported("group_size", group_size, "-1, 16 or a multiple of 32")
        self.quantization = f"{method}-{bits}bit"
        self._stored = stored
        self._bits = bits
        self._group_size = group_size

    def names(self) -> frozenset[str]:
        return frozenset(_weight_name(name) for name in self._stored.names())

    def tensor(self, name: str) -> torch.Tensor:
        matrix = self.matrix(name)
        return matrix.dequantized() if isinstance(matrix, GroupedMatrix) else matrix

    def matrix(self, name: str) -> torch.Tensor | GroupedMatrix:
        module = name.removesuffix(_WEIGHT_SUFFIX)
        if module == name or f"{module}.qweight" not in self._stored.names():
            return self._stored.matrix(name)
        codes = self._codes(module).contiguous()
        scales = self._stored.tensor(f"{module}.scales").float().T.contiguous()
        zeros = self._zeros(module)
        group_size = codes.shape[1] if self._group_size == -1 else self._group_size
        shape = (codes.shape[0], codes.shape[1] // group_size)
        if codes.shape[1] % group_size or scales.shape != shape or zeros.shape != shape:
            raise UnsupportedModelError(
                f"{module}: scales {list(scales.shape)} and qzeros {list(zeros.shape)} (transposed, unpacked) do not "
                f"belong to a qweight {list(codes.shape)} in groups of {group_size}"
            )
        self._check_order(module, codes.shape[1], group_size)
        is_symmetric = bool((zeros == 2 ** (self._bits - 1)).all())
        return GroupedMatrix(
            bits=self._bits,
            group_size=group_size,
            codes=codes,
            scales=scales,
            offsets=None if is_symmetric else -scales * zeros,
        )

    @abstractmethod
    def _codes(self, module: str) -> torch.Tensor:
        """[num_outputs, num_inputs] uint8."""

    @abstractmethod
    def _zeros(self, module: str) -> torch.Tensor:
        """[num_outputs, num_groups] uint8."""

    @abstractmethod
    def _check_order(self, module: str, num_inputs: int, group_size: int) -> None:
        """Raises UnsupportedModelError unless the module's groups are consecutive inputs."""

    def _unpacked(self, name: str) -> torch.Tensor:
        """An int32 tensor [rows, columns] as uint8 [rows, columns, 32 / bits], the lowest bits first."""
        packed = self._stored.tensor(name)
        if packed.dtype != torch.int32 or packed.dim() != 2:
            raise UnsupportedModelError(f"{name} is {packed.dtype} {list(packed.shape)}: must be a matrix of int32")
        octets = packed.contiguous().view(torch.uint8).reshape(*packed.shape, _BYTES_OF_INT32)
        return octets if self._bits == 8 else torch.stack([octets & 0x0F, octets >> 4], dim=3).flatten(2)


class GptqWeights(PackedWeights):
    """Zero points are stored as one less than they are, except in checkpoint format `gptq_v2`."""

    def __init__(self, stored: WeightSource, quantization_config: Mapping[str, Any]) -> None:
        config = quantization_config
        bits = config.get("bits")
        if bits not in (4, 8):
            raise _unsupported("bits", bits, "4 or 8")
        field = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
        checkpoint_format = config.get(field, "gptq")
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise _unsupported(field, checkpoint_format, "gptq or gptq_v2")
        if config.get("is_marlin_format"):
            raise _unsupported("is_marlin_format", True, "false")
        if config.get("dynamic"):
            raise _unsupported("dynamic", config["dynamic"], "left out")
        if (pack_dtype := config.get("pack_dtype", "int32")) != "int32":
            raise _unsupported("pack_dtype", pack_dtype, "int32")
        super().__init__(stored, "GPTQ", bits, config.get("group_size"))
        self._zeros_are_one_less = checkpoint_format == "gptq"

    def _codes(self, module: str) -> torch.Tensor:
        return self._unpacked(f"{module}.qweight").transpose(0, 1).flatten(1)

    def _zeros(self, module: str) -> torch.Tensor:
        zeros = self._unpacked(f"{module}.qzeros").flatten(1).T
        # A zero point of 0 was stored as all ones.
        return zeros + 1 & 2**self._bits - 1 if self._zeros_are_one_less else zeros

    def _check_order(self, module: str, num_inputs: int, group_size: int) -> None:
        name = f"{module}.g_idx"
        if name not in self._stored.names():
            return
        if not torch.equal(self._stored.tensor(name).long(), torch.arange(num_inputs) // group_size):
            raise UnsupportedModelError(
                f"config.json: quantization_config has desc_act: {name} scatters the inputs over the groups; only "
                "groups of consecutive inputs are supported"
            )


class AwqWeights(PackedWeights):
    """The version `gemm` of 4 bits."""

    def __init__(self, stored: WeightSource, quantization_config: Mapping[str, Any]) -> None:
        config = quantization_config
        if config.get("bits") != 4:
            raise _unsupported("bits", config.get("bits"), "4")
        field = "format" if config.get("version") is None else "version"
        version = config.get(field, "gemm")
        if str(version).lower() != "gemm":
            raise _unsupported(field, version, "gemm")
        if config.get("zero_point", True) is not True:
            raise _unsupported("zero_point", config["zero_point"], "true")
        super().__init__(stored, "AWQ", 4, config.get("group_size"))

    def _codes(self, module: str) -> torch.Tensor:
        return self._outputs(f"{module}.qweight")

    def _zeros(self, module: str) -> torch.Tensor:
        return self._outputs(f"{module}.qzeros")

    def _check_order(self, module: str, num_inputs: int, group_size: int) -> None:
        """AWQ knows no other order."""

    def _outputs(self, name: str) -> torch.Tensor:
        """int32 [rows, num_outputs / 8] → uint8 [num_outputs, rows]."""
        place_of_output = [_AWQ_ORDER.index(output) for output in range(len(_AWQ_ORDER))]
        return self._unpacked(name)[:, :, place_of_output].flatten(1).T


def _weight_name(stored_name: str) -> str:
    for suffix in _PACKED_SUFFIXES:
        if stored_name.endswith(suffix):
            return stored_name.removesuffix(suffix) + _WEIGHT_SUFFIX
    return stored_name


def _unsupported(field: str, value: object, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: quantization_config.{field} is {shown(value)}, which is not supported: must be {supported}"
    )
