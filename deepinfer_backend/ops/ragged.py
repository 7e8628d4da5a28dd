"""Rows of a ragged batch, one sequence's after another's."""

from __future__ import annotations

import torch


def sequence_of_rows(start_loc: torch.Tensor, num_rows: int) -> torch.Tensor:
    """start_loc: [num_seqs + 1] int32, where each sequence's rows begin → [num_rows] int64, whose each row is."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=start_loc.device)
    return torch.searchsorted(start_loc[1:], rows, right=True)


def advance_of(advance_slots: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """num_accepted [num_slots] of each slot [n], 0 for those below 0; [n] int64."""
    accepted = num_accepted[advance_slots.clamp(min=0).long()]
    return torch.where(advance_slots < 0, 0, accepted).long()
