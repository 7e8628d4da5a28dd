"""Drafts by prompt lookup: what followed when a sequence's last tokens stood in its prompt or output before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.ops.ngram_drafts import propose_ngram
from deepinfer_backend.ops.paged_attention import LayerCache
from deepinfer_backend.speculation.drafter import Drafter, SampledStep
from deepinfer_backend.speculation.token_history import TokenHistory
from deepinfer_backend.worker.model_runner import ForwardInputs
from deepinfer_backend.worker.slot_state import SlotState


class NgramDrafter(Drafter):
    """Looks for the longest run of last tokens, min_ngram to max_ngram of them, that the slot had before.

    It has no model, and so no layers.
    """

    needs_token_states = False
    max_tokens_behind = 0

    def __init__(self, history: TokenHistory, *, min_ngram: int, max_ngram: int) -> None:
        self._history = history
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    @property
    def layers(self) -> list[LayerShape]:
        return []

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        pass

    def follow_prefill(self, inputs: ForwardInputs, result: ForwardResult) -> None:
        pass

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        self._history.begin(slot, token_ids)

    def propose(self, step: SampledStep, state: SlotState) -> None:
        self._history.append(step.tensors)
        propose_ngram(
            self._history.token_ids,
            self._history.lens,
            step.tensors.sample_slots,
            state.next_tokens,
            self._min_ngram,
            self._max_ngram,
        )
