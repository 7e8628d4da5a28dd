"""What the device keeps of running sequences from one step to the next, by the slot that the scheduler gave them."""

from __future__ import annotations

import torch

from deepinfer_backend.ops.verify_drafts import NO_TOKEN

NO_SLOT = -1


class SlotState:
    """Owned by the Worker; read and written on the device's stream alone, so that the host never waits for it.

    next_tokens: [max_num_seqs, 1 + num_speculative_tokens] int32, the last token that was sampled for a slot, then the
    drafts for those after it, NO_TOKEN where there is none. num_accepted: [max_num_seqs] int32, how many drafts the
    last step that sampled for a slot accepted.
    """

    def __init__(self, max_num_seqs: int, num_speculative_tokens: int, device: torch.device) -> None:
        shape = (max_num_seqs, 1 + num_speculative_tokens)
        self.next_tokens = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=device)
        self.num_accepted = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
