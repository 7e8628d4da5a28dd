"""Drafts by a smaller model of the same vocabulary (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_backend.models.interface import ForwardResult, LayerShape, Model
from deepinfer_backend.ops.paged_attention import LayerCache
from deepinfer_backend.ops.verify_drafts import NO_TOKEN
from deepinfer_backend.speculation.asked_sequences import sequences_asked_about
from deepinfer_backend.speculation.drafter import Drafter, SampledStep
from deepinfer_backend.speculation.token_history import TokenHistory
from deepinfer_backend.worker.model_runner import ForwardInputs
from deepinfer_backend.worker.slot_state import SlotState


class DraftModelDrafter(Drafter):
    """The model computes each prompt after the other one; then, of each sequence that it is asked about, the tokens
    that it does not know yet, and its own drafts one after another.

    It draws a draft as the request draws, with the random number that the token itself will be drawn with: two models
    of similar distributions then mostly draw the same. What the request bans, biases or penalizes it does not know.
    """

    needs_token_states = False
    max_tokens_behind = 64

    def __init__(self, model: Model, history: TokenHistory, block_size: int) -> None:
        self._model = model
        self._history = history
        self._block_size = block_size

    @property
    def layers(self) -> list[LayerShape]:
        return self._model.layers

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        self._model.use_caches(caches)

    def follow_prefill(self, inputs: ForwardInputs, result: ForwardResult) -> None:
        tensors = inputs.tensors
        # One row of logits is asked for because one must be.
        self._model.forward(tensors.token_ids, tensors.positions, inputs.attention, tensors.logits_indices[:1])

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        self._history.begin(slot, token_ids)

    def propose(self, step: SampledStep, state: SlotState) -> None:
        self._history.append(step.tensors)
        state.next_tokens[step.tensors.sample_slots.long(), 1:] = NO_TOKEN
        if not step.query_lens.any():
            return
        asked = sequences_asked_about(step, self._block_size)
        query_lens = step.query_lens[step.query_lens > 0]
        for num_drafted in range(step.num_drafts):
            rows = asked.rows_up_to(num_drafted, query_lens)
            token_ids = self._history.token_ids[asked.slots[rows.sequences], rows.positions].long()
            logits = self._model.forward(token_ids, rows.positions, rows.attention, rows.ends - 1).logits
            drafts = asked.draw(logits, num_drafted, state).int()
            state.next_tokens[asked.slots, 1 + num_drafted] = drafts
            # Where the next forward reads it; behind what counts.
            self._history.token_ids[asked.slots, asked.positions(1 + num_drafted)] = drafts
            query_lens = np.ones_like(query_lens)
