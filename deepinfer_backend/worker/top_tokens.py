"""The k largest of each row, in an order that leaves nothing open; and the largest one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class TopTokens:
    """values: [num_rows, k], the largest first; token_ids: [num_rows, k] int64, of equal values the lower id first."""

    values: torch.Tensor
    token_ids: torch.Tensor


def split_in_blocks(rows: torch.Tensor, block: int, fill: float) -> torch.Tensor:
    """[num_rows, n] → [num_rows, ceil(n / block), block]; the last block is filled up."""
    missing = -rows.shape[1] % block
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=fill)
    # Not -1: a step that samples nothing has no rows, and logits for its prompt all the same.
    return rows.view(rows.shape[0], rows.shape[1] // block, block)


def top_token(logits: torch.Tensor) -> torch.Tensor:
    """Logits [num_rows, vocab_size] → the likeliest token [num_rows] int64; the lowest id among equals."""
    blocks = split_in_blocks(logits, _BLOCK, -torch.inf)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    inside = blocks[torch.arange(len(blocks), device=logits.device), block]
    return block * _BLOCK + inside.argmax(dim=-1)


def top_tokens(logits: torch.Tensor, k: int) -> TopTokens:
    """The k largest of float32 logits [num_rows, vocab_size], 0 <= k <= vocab_size.

    A row's result depends on the row alone, ties included, so that the first j of k are the same for every k.
    """
    num_rows, vocab_size = logits.shape
    if 2 * k * _BLOCK > vocab_size:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return TopTokens(ordered.values[:, :k], ordered.indices[:, :k])
    # The k largest lie in the k blocks with the largest maxima: a token outside would have k tokens before it.
    blocks = split_in_blocks(logits, _BLOCK, -torch.inf)
    block_ids = torch.arange(blocks.shape[1], device=logits.device)
    best = _ordering_key(blocks.amax(dim=-1), block_ids).topk(k, dim=-1, sorted=False).indices
    candidates = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).view(num_rows, k * _BLOCK)
    ids = best[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    ids = ids.view(num_rows, k * _BLOCK)
    chosen = _ordering_key(candidates, ids).topk(k, dim=-1).indices
    return TopTokens(candidates.gather(1, chosen), ids.gather(1, chosen))


def _ordering_key(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64, larger for a larger float32 value and, among equal values, for a lower id: no two are the same."""
    # + 0.0 makes one zero of the two; the bits of a negative float count backwards.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - ids
