"""What the engine needs of a model, whoever made its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer_backend.models.lora import LoraLayers
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """In a cache of `dtype`; int8 has a float32 scale for each key and value."""
        scales = 2 * torch.float32.itemsize if dtype == torch.int8 else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """logits: [num_rows, vocab_size]; hidden_states: [num_rows, hidden_size], what the output layer was given.

    token_states: [num_tokens, hidden_size], what it would be given of every token; None unless asked for.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor
    token_states: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """Of a step's tokens those that stand for media; on the device.

    rows: [num_rows] int64, which of the tokens; embeddings: [num_rows, hidden_size], in the model's dtype, what they
    are instead. rope_offsets: [3, num_tokens] int64, added to positions, or None.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    rope_offsets: torch.Tensor | None


class MediaEncoder(Protocol):
    """The vision part of a model."""

    def encode(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """One medium's features → its embeddings [num_tokens, hidden_size]; on the device's stream."""


class Model(Protocol):
    """A causal language model over the paged cache. Its forward happens on the device's stream.

    dtype: of its weights that are plain floats; weight_format: of most of them, as a user reads it, such as "bfloat16"
    or "Q4_1"; layers: what each of its attention layers stores; lora: the adapters that it can add;
    media_encoder: None, if it takes no media.
    """

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def weight_format(self) -> str: ...
    @property
    def layers(self) -> list[LayerShape]: ...
    @property
    def lora(self) -> LoraLayers: ...
    @property
    def media_encoder(self) -> MediaEncoder | None: ...

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        """Those that every later forward writes and reads, one a layer; before the first forward, on any thread."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_indices: torch.Tensor,
        *,
        wants_token_states: bool = False,
        media: MediaInputs | None = None,
    ) -> ForwardResult:
        """Stores the step's keys and values in the caches, and computes logits where they are asked for.

        token_ids, positions: [num_tokens] int64; logits_indices: [num_rows] int64, tokens of the step, at least one.
        media: for models that take any.
        """
