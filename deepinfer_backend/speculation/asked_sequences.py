"""The sequences of a step that a drafter with a model proposes for: where they stand, and how they draw."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend.ops.paged_attention import AttentionStep
from deepinfer_backend.ops.ragged import sequence_of_rows
from deepinfer_backend.ops.uniforms import SampledRows, uniforms_of
from deepinfer_backend.speculation.drafter import SampledStep
from deepinfer_backend.worker.device import host_to_device
from deepinfer_backend.worker.random_draw import SamplingRows, sample_tokens
from deepinfer_backend.worker.slot_state import NO_SLOT, SlotState
from deepinfer_backend.worker.step_buffers import StepTensors


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Tokens that a drafter computes at once, one sequence's after another's, which end with its last.

    positions, sequences (which of those asked about): [num_tokens] int64; ends: [n] int64, one past each's last row.
    """

    positions: torch.Tensor
    sequences: torch.Tensor
    ends: torch.Tensor
    attention: AttentionStep


@dataclass(frozen=True, slots=True)
class AskedSequences:
    """The n sequences for which drafts are to be proposed.

    indices (among those that the step sampled for), slots, last_positions (of their last tokens), seeds,
    output_indices (of what follows): [n] int64. block_tables: [n, max_num_blocks] int32. rows: how each draws. limit:
    positions are below.
    """

    indices: torch.Tensor
    slots: torch.Tensor
    last_positions: torch.Tensor
    block_tables: torch.Tensor
    seeds: torch.Tensor
    output_indices: torch.Tensor
    rows: SamplingRows
    block_size: int
    limit: int
    max_seq_len: int

    def positions(self, num_tokens_on: int) -> torch.Tensor:
        """So many tokens behind the last; [n] int64. One beyond the limit is that of a sequence which has ended."""
        return (self.last_positions + num_tokens_on).clamp(max=self.limit - 1)

    def rows_up_to(self, num_tokens_on: int, query_lens: NDArray[np.int32]) -> DraftRows:
        """The last query_lens [n] tokens of each up to that position."""
        last, device = self.positions(num_tokens_on), self.slots.device
        num_tokens = int(query_lens.sum())
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        query_start_loc = host_to_device(torch.from_numpy(starts), device)
        ends = query_start_loc[1:].long()
        sequences = sequence_of_rows(query_start_loc, num_tokens)
        positions = last[sequences] + 1 - ends[sequences] + torch.arange(num_tokens, device=device)
        blocks = self.block_tables[sequences, positions // self.block_size].long()
        attention = AttentionStep(
            block_tables=self.block_tables,
            seq_lens=(last + 1).int(),
            query_start_loc=query_start_loc,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            max_query_len=int(query_lens.max()),
            max_seq_len=self.max_seq_len,
        )
        return DraftRows(positions, sequences, ends, attention)

    def draw(self, logits: torch.Tensor, num_drafted: int, state: SlotState) -> torch.Tensor:
        """A token for each row of logits [n, vocab_size], as the request will draw the token itself; [n] int64."""
        if not self.rows.all_greedy:
            num_seqs, device = len(self.slots), self.slots.device
            one_row_each = SampledRows(
                self.seeds,
                self.output_indices + num_drafted,
                torch.full((num_seqs,), NO_SLOT, dtype=torch.int32, device=device),
                torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
            )
            uniforms_of(one_row_each, state.num_accepted, self.rows.uniforms, torch.empty_like(self.output_indices))
        token_ids = torch.empty_like(self.slots)
        sample_tokens(logits.float().contiguous(), self.rows, token_ids)
        return token_ids


def block_tables_of_sampled(tensors: StepTensors) -> torch.Tensor:
    """Of the sequences that the step sampled for; [num_sampled, max_num_blocks] int32."""
    tokens = tensors.logits_indices[tensors.sample_start_loc[:-1].long()].int()
    return tensors.block_tables[torch.searchsorted(tensors.query_start_loc[1:], tokens, right=True)]


def sequences_asked_about(step: SampledStep, block_size: int) -> AskedSequences:
    tensors, rows = step.tensors, step.rows
    indices = host_to_device(torch.from_numpy(np.flatnonzero(step.query_lens)), tensors.positions.device)
    first_rows = tensors.sample_start_loc[indices].long()
    tokens = tensors.logits_indices[first_rows]
    num_new = tensors.num_sampled_tokens[indices].long()
    block_tables = block_tables_of_sampled(tensors)[indices]
    return AskedSequences(
        indices=indices,
        slots=tensors.sample_slots[indices].long(),
        last_positions=tensors.positions[tokens] + num_new,
        block_tables=block_tables,
        seeds=tensors.seeds[indices],
        output_indices=tensors.row_output_indices[first_rows] + num_new,
        rows=dataclasses.replace(
            rows,
            temperature=rows.temperature[first_rows],
            min_p=rows.min_p[first_rows],
            top_k=rows.top_k[first_rows],
            top_p=rows.top_p[first_rows],
            uniforms=rows.uniforms[first_rows],
        ),
        block_size=block_size,
        limit=min(step.max_seq_len, block_tables.shape[1] * block_size),
        max_seq_len=step.max_seq_len,
    )
