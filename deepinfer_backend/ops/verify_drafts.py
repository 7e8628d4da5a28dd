"""Which drafts the model would have sampled itself: one entry, CPU and CUDA behind it; nothing waits for the device.

A token is drawn by one uniform number, whatever was drafted, and a draft is accepted if it is that token. For a draft
with all its probability in one token this is what rejection sampling (Leviathan et al. 2023, Chen et al. 2023) does: it
accepts with the token's probability and draws from the others without it.
"""

from __future__ import annotations

import torch

from deepinfer_backend.ops.kernels import kernels

NO_TOKEN = -1


def verify_drafts(
    targets: torch.Tensor,
    sample_start_loc: torch.Tensor,
    slots: torch.Tensor,
    next_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """Accepts of each sequence the leading drafts that equal their targets.

    targets: [num_rows] int64, what was drawn from each row of logits; sample_start_loc: [num_seqs + 1] int32, where
    each sequence's rows begin, one for its last token and one for each of its drafts; slots: [num_seqs] int32, all
    different. next_tokens: [num_slots, 1 + num_speculative_tokens] int32, a slot's drafts from column 1 on;
    num_accepted: [num_slots] int32.

    Fills in token_ids [num_seqs, 1 + num_speculative_tokens] int32, the targets up to and including the first that
    differs from its draft, then NO_TOKEN, and how many they are, num_tokens [num_seqs] int32. A target that is NO_TOKEN
    is the one token of a sequence that accepts no draft; one that does ends at its last accepted draft instead, and the
    next step finds out again. The slot's last token goes into column 0 of next_tokens, and its number of tokens less
    one into num_accepted.

    Raises:
        ValueError: a tensor or an index in it does not fit (on CPU).
    """
    verify = kernels.verify_drafts if targets.device.type == "cpu" else verify_drafts_in_torch
    verify(targets, sample_start_loc, slots, next_tokens, num_accepted, token_ids, num_tokens)


def verify_drafts_in_torch(
    targets: torch.Tensor,
    sample_start_loc: torch.Tensor,
    slots: torch.Tensor,
    next_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """`verify_drafts` on any device; CUDA's way."""
    if len(slots) == 0:
        return
    slots = slots.long()
    starts = sample_start_loc[:-1, None]
    columns = torch.arange(next_tokens.shape[1], device=targets.device)
    tokens = targets[(starts + columns).clamp(max=len(targets) - 1)]
    is_draft = columns[1:] < sample_start_loc.diff()[:, None]
    is_accepted = (tokens[:, :-1] == next_tokens[slots, 1:]) & (tokens[:, :-1] != NO_TOKEN) & is_draft
    accepted = is_accepted.int().cumprod(dim=1).sum(dim=1)
    accepted -= ((accepted > 0) & (tokens.gather(1, accepted[:, None]).squeeze(1) == NO_TOKEN)).long()
    token_ids.copy_(torch.where(columns <= accepted[:, None], tokens, NO_TOKEN))
    num_tokens.copy_(accepted + 1)
    next_tokens[slots, 0] = tokens.gather(1, accepted[:, None]).squeeze(1).int()
    num_accepted[slots] = accepted.int()
