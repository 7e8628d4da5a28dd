"""Drafts by prompt lookup: what followed when a sequence's last tokens stood in its prompt or output before."""

from __future__ import annotations

import torch

from deepinfer_backend.ops.ngram_drafts import append_history, begin_history, propose_ngram
from deepinfer_backend.speculation.drafter import SampledTokens
from deepinfer_backend.worker.slot_state import SlotState


class NgramDrafter:
    """Keeps each slot's tokens on the device: where a step's own are known before the host knows them."""

    def __init__(
        self, *, max_num_seqs: int, max_seq_len: int, min_ngram: int, max_ngram: int, device: torch.device
    ) -> None:
        self._history = torch.zeros(max_num_seqs, max_seq_len, dtype=torch.int32, device=device)
        self._history_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        begin_history(self._history, self._history_lens, slot, token_ids)

    def propose(self, sampled: SampledTokens, state: SlotState) -> None:
        append_history(sampled.token_ids, sampled.num_tokens, sampled.slots, self._history, self._history_lens)
        propose_ngram(
            self._history, self._history_lens, sampled.slots, state.next_tokens, self._min_ngram, self._max_ngram
        )
