"""The interface of what proposes tokens for a step to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer_backend.worker.slot_state import SlotState


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled, on the device.

    slots: [num_seqs] int32, of the sequences that it sampled for; token_ids: [num_seqs, 1 + num_speculative_tokens]
    int32, of which the first num_tokens [num_seqs] int32 are new.
    """

    slots: torch.Tensor
    token_ids: torch.Tensor
    num_tokens: torch.Tensor


class Drafter(Protocol):
    """Proposes what may come next. Every call happens on the device's stream, in the order of steps; none waits for it.

    What it proposes decides how fast tokens come, and never which.
    """

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        """The slot belongs to another sequence from now on, whose tokens are these, [num_tokens] int32 on the host."""

    def propose(self, sampled: SampledTokens, state: SlotState) -> None:
        """Takes a step's tokens, and writes the drafts for those after them into state.next_tokens[slots, 1:]."""
