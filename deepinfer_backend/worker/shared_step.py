"""A step's batch, from the leader of a tensor-parallel engine to its other ranks: one packed array.

It is sent when the device comes to the step: by then the tokens are there that the host has not seen yet, so that
nobody else must know what the leader samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.models.interface import MediaInputs
from deepinfer_backend.ops.paged_attention import AttentionStep
from deepinfer_backend.ops.rank_world import TensorGroup

_NUM_SIZES = 13
_WORD_BYTES = torch.int64.itemsize


@dataclass(frozen=True, slots=True)
class SharedStep:
    """What a rank must know to compute a step's forward; shapes as in `models.interface.Model.forward`.

    block_copies: [num_copies, 2] of (source, target), or None; they come first. media: the leader alone computes the
    embeddings.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionStep
    logits_indices: torch.Tensor
    block_copies: torch.Tensor | None
    wants_token_states: bool
    media: MediaInputs | None = None


def send_step(group: TensorGroup, step: SharedStep) -> None:
    attention = step.attention
    num_seqs, max_num_blocks = attention.block_tables.shape
    parts = [
        step.token_ids,
        step.positions,
        attention.slot_mapping,
        step.logits_indices,
        attention.query_start_loc,
        attention.seq_lens,
        attention.block_tables,
    ]
    if step.block_copies is not None:
        parts.append(step.block_copies.to(step.token_ids.device))
    if attention.key_ends is not None:
        parts.append(attention.key_ends)
    media = step.media
    if media is not None:
        parts.append(media.rows)
        if media.rope_offsets is not None:
            parts.append(media.rope_offsets)
        # Its bits, not its numbers; embeddings are of whole 8 bytes.
        parts.append(media.embeddings.view(torch.int64))
    group.send(
        [
            len(step.token_ids),
            len(step.logits_indices),
            num_seqs,
            max_num_blocks,
            0 if step.block_copies is None else len(step.block_copies),
            attention.max_query_len,
            attention.max_seq_len,
            step.wants_token_states,
            attention.key_ends is not None,
            media is not None,
            media is not None and media.rope_offsets is not None,
            0 if media is None else len(media.rows),
            0 if media is None else media.embeddings.shape[1] * media.embeddings.itemsize // _WORD_BYTES,
        ],
        torch.cat([part.flatten().long() for part in parts]),
    )


def receive_step(group: TensorGroup, device: torch.device, dtype: torch.dtype) -> SharedStep:
    """dtype: of the model."""
    sizes, payload = group.receive(_NUM_SIZES, device)
    num_tokens, num_logits, num_seqs, max_num_blocks, num_copies, max_query_len, max_seq_len, *rest = sizes
    wants_token_states, has_key_ends, has_media, has_rope_offsets, num_media_rows, row_words = rest
    (
        token_ids,
        positions,
        slot_mapping,
        logits_indices,
        query_start_loc,
        seq_lens,
        block_tables,
        copies,
        key_ends,
        media_rows,
        rope_offsets,
        embeddings,
    ) = torch.split(
        payload,
        [
            num_tokens,
            num_tokens,
            num_tokens,
            num_logits,
            num_seqs + 1,
            num_seqs,
            num_seqs * max_num_blocks,
            2 * num_copies,
            has_key_ends * num_tokens,
            num_media_rows,
            has_rope_offsets * 3 * num_tokens,
            num_media_rows * row_words,
        ],
    )
    attention = AttentionStep(
        block_tables=block_tables.int().view(num_seqs, max_num_blocks),
        seq_lens=seq_lens.int(),
        query_start_loc=query_start_loc.int(),
        slot_mapping=slot_mapping,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        key_ends=key_ends.int() if has_key_ends else None,
    )
    media = None
    if has_media:
        media = MediaInputs(
            media_rows,
            embeddings.view(num_media_rows, row_words).view(dtype),
            rope_offsets.view(3, num_tokens) if has_rope_offsets else None,
        )
    return SharedStep(
        token_ids,
        positions,
        attention,
        logits_indices,
        copies.view(num_copies, 2) if num_copies else None,
        bool(wants_token_states),
        media,
    )
