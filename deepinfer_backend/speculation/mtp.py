"""Drafts by a multi-token-prediction module of the DeepSeek-V3 kind (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.models.mtp_head import MtpHead
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache
from deepinfer_backend.ops.verify_drafts import NO_TOKEN
from deepinfer_backend.speculation.asked_sequences import (
    AskedSequences,
    block_tables_of_sampled,
    sequences_asked_about,
)
from deepinfer_backend.speculation.drafter import Drafter, SampledStep
from deepinfer_backend.worker.model_runner import ForwardInputs
from deepinfer_backend.worker.slot_state import SlotState

_NO_ROWS = torch.empty(0, dtype=torch.int64)


class MtpDrafter(Drafter):
    """From the model's last hidden state of a token and the token after it the module makes the one after that; its own
    hidden state, in place of the model's, makes the next.

    What it stores for a token and the next one lies in the first one's place. It stores them for all sequences of a
    step that asks about any: the hidden states are there then and not later. Where drafts do not pay none is asked
    about, and nothing is stored; nor is it right at the last token of a prompt's chunk and in a block from the prefix
    cache, whose next token may be another. What is missing or wrong makes later drafts worse, and nothing else.
    """

    needs_token_states = True
    max_tokens_behind = 2**31 - 1

    def __init__(self, head: MtpHead, block_size: int) -> None:
        self._head = head
        self._block_size = block_size

    @property
    def layers(self) -> list[LayerShape]:
        return self._head.layers

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        self._head.use_caches(caches)

    def follow_prefill(self, inputs: ForwardInputs, result: ForwardResult) -> None:
        assert result.token_states is not None
        tensors = inputs.tensors
        # What follows a sequence's last token here is another's first; if it is sampled for, `propose` stores it again.
        following = tensors.token_ids.roll(-1)
        self._head.forward(following, result.token_states, tensors.positions, inputs.attention, _NO_ROWS)

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        pass

    def propose(self, step: SampledStep, state: SlotState) -> None:
        state.next_tokens[step.tensors.sample_slots.long(), 1:] = NO_TOKEN
        if not step.num_drafts:
            return
        asked = sequences_asked_about(step, self._block_size)
        result = self._take_sampled(step, asked)
        drafts = self._draw(asked, result, 0, state)
        one_each = np.ones(len(asked.slots), np.int32)
        for num_drafted in range(1, step.num_drafts):
            rows = asked.rows_up_to(num_drafted - 1, one_each)
            result = self._head.forward(drafts, result.hidden_states, rows.positions, rows.attention, rows.ends - 1)
            drafts = self._draw(asked, result, num_drafted, state)

    def _draw(self, asked: AskedSequences, result: ForwardResult, num_drafted: int, state: SlotState) -> torch.Tensor:
        """The next draft of each, [n] int64."""
        drafts = asked.draw(result.logits, num_drafted, state)
        if self._head.draft_token_ids is not None:
            drafts = self._head.draft_token_ids[drafts]
        state.next_tokens[asked.slots, 1 + num_drafted] = drafts.int()
        return drafts

    def _take_sampled(self, step: SampledStep, asked: AskedSequences) -> ForwardResult:
        """Stores what the step's rows of logits gave; of those asked about what follows their last token.

        Rows of drafts that were not accepted store nothing of use, and are stored over.
        """
        tensors = step.tensors
        num_rows = len(tensors.targets)
        tokens = tensors.logits_indices[:num_rows]
        positions, starts = tensors.positions[tokens], tensors.sample_start_loc
        last_rows = starts[1:].long() - 1
        attention = AttentionStep(
            block_tables=block_tables_of_sampled(tensors),
            seq_lens=(positions[last_rows] + 1).int(),
            query_start_loc=starts,
            slot_mapping=tensors.slot_mapping[tokens],
            max_query_len=tensors.sampled_token_ids.shape[1],
            max_seq_len=step.max_seq_len,
        )
        accepted_rows = starts[asked.indices].long() + tensors.num_sampled_tokens[asked.indices].long() - 1
        return self._head.forward(
            tensors.targets.clamp(min=0), step.hidden_states[:num_rows], positions, attention, accepted_rows
        )
