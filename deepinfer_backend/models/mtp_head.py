"""Multi-token-prediction modules of the DeepSeek-V3 kind (arXiv 2412.19437, section 2.2): one layer beside a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache


class MtpHead(Protocol):
    """Its forward happens on the device's stream.

    layers: what its attention layer stores; draft_token_ids: the tokens that its logits are of, [num_columns] int64,
    ascending; None: all of the vocabulary.
    """

    @property
    def layers(self) -> list[LayerShape]: ...

    @property
    def draft_token_ids(self) -> torch.Tensor | None: ...

    def use_caches(self, caches: Sequence[LayerCache]) -> None: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_indices: torch.Tensor,
    ) -> ForwardResult:
        """What follows each token, from the hidden state of the one before it, which the output layer was given.

        token_ids: [num_tokens] int64; hidden_states: [num_tokens, hidden_size]; positions: [num_tokens] int64, of the
        tokens before them, in whose places keys and values are stored; logits_indices: [num_rows] int64, maybe none.
        The hidden states of the result are what the output layer was given here.
        """
