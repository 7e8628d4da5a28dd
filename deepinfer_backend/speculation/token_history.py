"""Each slot's tokens on the device: where a step's own are known before the host knows them."""

from __future__ import annotations

import torch

from deepinfer_backend.ops.ngram_drafts import append_history, begin_history
from deepinfer_backend.worker.step_buffers import StepTensors


class TokenHistory:
    """token_ids: [max_num_seqs, max_seq_len] int32, of which the first lens [max_num_seqs] int32 of a row count."""

    def __init__(self, max_num_seqs: int, max_seq_len: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(max_num_seqs, max_seq_len, dtype=torch.int32, device=device)
        self.lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        """The slot's tokens are these, [num_tokens] int32 on any device."""
        begin_history(self.token_ids, self.lens, slot, token_ids)

    def append(self, step: StepTensors) -> None:
        """Adds what the step sampled."""
        append_history(step.sampled_token_ids, step.num_sampled_tokens, step.sample_slots, self.token_ids, self.lens)
