"""Drafts by prompt lookup: what followed when a sequence's last tokens stood in it before.

The longest run of last tokens that occurs earlier counts (Saxena 2023, "Prompt Lookup Decoding"), and of several
occurrences the latest, whose continuation is the likeliest to come again. Histories are kept on the device, a row for
each slot. One entry for each operation, CPU and CUDA behind it; nothing waits for the device.
"""

from __future__ import annotations

import torch

from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.ops.verify_drafts import NO_TOKEN


def begin_history(history: torch.Tensor, history_lens: torch.Tensor, slot: int, token_ids: torch.Tensor) -> None:
    """A slot's history becomes token_ids [n] int32, n at most max_seq_len, on any device.

    history: [num_slots, max_seq_len] int32; history_lens: [num_slots] int32.
    """
    history[slot, : len(token_ids)].copy_(token_ids, non_blocking=True)
    history_lens[slot].fill_(len(token_ids))


def append_history(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    history_lens: torch.Tensor,
) -> None:
    """Adds to the histories what `verify_drafts` gave, as far as there is room; NO_TOKEN is no token.

    token_ids: [num_seqs, 1 + num_speculative_tokens] int32; num_tokens: [num_seqs] int32; slots: [num_seqs] int32, all
    different; history: [num_slots, max_seq_len] int32; history_lens: [num_slots] int32.

    Raises:
        ValueError: a tensor or an index in it does not fit (on CPU).
    """
    append = kernels.append_history if history.device.type == "cpu" else append_history_in_torch
    append(token_ids, num_tokens, slots, history, history_lens)


def propose_ngram(
    history: torch.Tensor,
    history_lens: torch.Tensor,
    slots: torch.Tensor,
    next_tokens: torch.Tensor,
    min_ngram: int,
    max_ngram: int,
) -> None:
    """Fills in the drafts of each slot, next_tokens[slot, 1:]; NO_TOKEN where nothing was found.

    history: [num_slots, max_seq_len] int32; history_lens: [num_slots] int32; slots: [num_seqs] int32, all different;
    next_tokens: [num_slots, 1 + num_speculative_tokens] int32. min_ngram, max_ngram: how many last tokens must occur
    earlier, and how many are compared at most. An occurrence may overlap with the last tokens; where what followed it
    comes to the end of the history, it goes on with the drafts themselves, so that a period is continued.

    Raises:
        ValueError: a tensor or an index in it does not fit (on CPU).
    """
    propose = kernels.propose_ngram if history.device.type == "cpu" else propose_ngram_in_torch
    propose(history, history_lens, slots, next_tokens, min_ngram, max_ngram)


def append_history_in_torch(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    history_lens: torch.Tensor,
) -> None:
    """`append_history` on any device; CUDA's way."""
    slots = slots.long()
    max_len = history.shape[1]
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    # Only the last token can be NO_TOKEN.
    is_token = (columns < num_tokens[:, None]) & (token_ids != NO_TOKEN)
    places = history_lens[slots, None].long() + columns
    is_token &= places < max_len
    # A column without a token writes again what stands in a place of its own.
    places %= max_len
    history[slots[:, None], places] = torch.where(is_token, token_ids, history[slots[:, None], places])
    history_lens[slots] += is_token.sum(dim=1, dtype=torch.int32)


def propose_ngram_in_torch(
    history: torch.Tensor,
    history_lens: torch.Tensor,
    slots: torch.Tensor,
    next_tokens: torch.Tensor,
    min_ngram: int,
    max_ngram: int,
) -> None:
    """`propose_ngram` on any device; CUDA's way."""
    slots = slots.long()
    tokens, lens = history[slots], history_lens[slots, None].long()
    max_len = tokens.shape[1]
    ends = torch.arange(max_len, device=tokens.device)
    matched = torch.zeros_like(tokens)
    is_matched = ends < lens - 1
    for distance in range(min(max_ngram, max_len)):
        last = tokens.gather(1, (lens - 1 - distance).clamp(min=0))
        is_matched[:, :distance] = False
        is_matched[:, distance:] &= tokens[:, : max_len - distance] == last
        matched += is_matched
    # Longest first, then latest.
    end = (matched.long() * max_len + ends).argmax(dim=1, keepdim=True)
    is_found = matched.gather(1, end) >= min_ngram
    period = (lens - 1 - end).clamp(min=1)
    ahead = torch.arange(next_tokens.shape[1] - 1, device=tokens.device)
    drafts = tokens.gather(1, (end + 1 + ahead % period).clamp(max=max_len - 1))
    next_tokens[slots, 1:] = torch.where(is_found, drafts, NO_TOKEN)
