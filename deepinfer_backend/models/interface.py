"""What a model asks of whoever holds the KV cache, and tells about what it stores there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class Attention(Protocol):
    """One step's attention over everything its sequences have stored so far."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Stores the step's keys and values, then attends.

        query: [num_tokens, num_heads, key_dim]; key: [num_tokens, num_kv_heads, key_dim]; value: [num_tokens,
        num_kv_heads, value_dim]; window: keys that a query sees, itself included (None: all before it).
        Returns [num_tokens, num_heads, value_dim].
        """
