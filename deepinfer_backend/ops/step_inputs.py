"""What the host does not know of a step when it launches it: the device completes the step's arrays.

The tokens that the step before sampled, the drafts that follow them, and where all of them stand, which depends on how
many drafts that step accepted. One entry each, CPU and CUDA behind it; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.ops.ragged import advance_of, sequence_of_rows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Arrays of one step, as the scheduler wrote them: positions, slot_mapping and seq_lens at the least advance.

    token_ids, positions, slot_mapping (block * block_size + offset): [num_tokens] int64; seq_lens: [num_seqs] int32.
    token_sources: [num_tokens] int32, an index into all of next_tokens, below 0 where token_ids is right.
    advance_slots: [num_seqs] int32, the slot whose accepted drafts the row's positions are to be moved by, below 0
    where they are right. query_start_loc: [num_seqs + 1] int32; block_tables: [num_seqs, max_num_blocks] int32.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    token_sources: torch.Tensor
    advance_slots: torch.Tensor
    query_start_loc: torch.Tensor
    block_tables: torch.Tensor


def resolve_step_inputs(
    step: StepInputs, next_tokens: torch.Tensor, num_accepted: torch.Tensor, *, block_size: int, max_seq_len: int
) -> None:
    """Completes the first four of the step's arrays in place. Once for each step: positions move each time.

    next_tokens: [num_slots, 1 + num_speculative_tokens] int32; no token there (NO_TOKEN) gives token 0. num_accepted:
    [num_slots] int32. What would stand beyond its block table or max_seq_len belongs to a sequence that has ended, and
    stays within bounds: slot 0, the last position.

    Raises:
        ValueError: a tensor or an index in it does not fit (on CPU).
    """
    if step.token_ids.device.type != "cpu":
        resolve_step_inputs_in_torch(step, next_tokens, num_accepted, block_size=block_size, max_seq_len=max_seq_len)
        return
    kernels.resolve_step_inputs(
        step.token_ids,
        step.positions,
        step.slot_mapping,
        step.seq_lens,
        step.token_sources,
        step.advance_slots,
        step.query_start_loc,
        step.block_tables,
        next_tokens,
        num_accepted,
        block_size,
        max_seq_len,
    )


def resolve_step_inputs_in_torch(
    step: StepInputs, next_tokens: torch.Tensor, num_accepted: torch.Tensor, *, block_size: int, max_seq_len: int
) -> None:
    """`resolve_step_inputs` on any device; CUDA's way."""
    sources = step.token_sources
    tokens = next_tokens.flatten()[sources.clamp(min=0).long()].clamp(min=0)
    step.token_ids.copy_(torch.where(sources < 0, step.token_ids, tokens))

    limit = min(max_seq_len, step.block_tables.shape[1] * block_size)
    advance = advance_of(step.advance_slots, num_accepted)
    seqs = sequence_of_rows(step.query_start_loc, len(step.positions))
    positions = step.positions + advance[seqs]
    last = torch.clamp(positions, max=limit - 1)
    slots = step.block_tables[seqs, last // block_size].long() * block_size + last % block_size
    is_moved = step.advance_slots >= 0
    moved = is_moved[seqs]
    step.slot_mapping.copy_(torch.where(moved, torch.where(positions < limit, slots, 0), step.slot_mapping))
    step.positions.copy_(torch.where(moved, last, step.positions))
    lens = torch.clamp(step.seq_lens + advance, max=limit)
    step.seq_lens.copy_(torch.where(is_moved, lens, step.seq_lens))
