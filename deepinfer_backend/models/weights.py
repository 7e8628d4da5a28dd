"""Where a model's weights come from, by their names in Hugging Face's checkpoints, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A weight [num_outputs, num_inputs] of few bits: weight = scale * code + offset in each group of inputs.

    codes: [num_outputs, num_inputs] uint8, 0 to 2**bits - 1; scales, offsets: [num_outputs, num_inputs / group_size]
    float32; offsets None: -2**(bits - 1) * scale everywhere.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    def dequantized(self) -> torch.Tensor:
        """[num_outputs, num_inputs] float32."""
        offsets = -(2.0 ** (self.bits - 1)) * self.scales if self.offsets is None else self.offsets
        codes = self.codes.reshape(self.codes.shape[0], -1, self.group_size).float()
        return (codes * self.scales[:, :, None] + offsets[:, :, None]).flatten(1)


class WeightSource(Protocol):
    """Names are those of transformers' modules, such as `model.layers.0.self_attn.q_proj.weight`."""

    @property
    def quantization(self) -> str | None:
        """What most matrices are stored in, such as "Q4_1"; None if they are plain floats."""

    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored, or dequantized to float32. Raises UnsupportedModelError if there is none of that name."""

    def matrix(self, name: str) -> torch.Tensor | GroupedMatrix:
        """The same for what a matrix product takes, [num_outputs, num_inputs], without dequantizing it."""


class DequantizedWeights:
    """The weights of another source, none of them quantized."""

    quantization: str | None = None

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> frozenset[str]:
        return self._source.names()

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(name)

    def matrix(self, name: str) -> torch.Tensor:
        return self._source.tensor(name)
