"""Log-probabilities of the model's own distribution: of the tokens that were chosen, and of the likeliest ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.worker.top_tokens import top_tokens


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms, on the device; m rows asked for them.

    rows: [m] int64, which rows these are. logprobs: [m] float32 of the row's token. ranks: [m] int32, 1 + how many
    tokens are likelier. top_token_ids: [m, k] int32 and top_logprobs: [m, k] float32, the likeliest first and of equal
    ones the lower id: the first j are the same for every k.
    """

    rows: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top_logprobs: int, rows: torch.Tensor | None = None
) -> RowLogprobs:
    """Of the model's unchanged logits [m, vocab_size] and one token each, [m].

    rows: what to call them in the result; 0 … m - 1 if left out.
    """
    logits = logits.float()
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    token_ids = token_ids.long()[:, None]
    logprobs = logits.log_softmax(dim=-1)
    # Compared as logits: equal log-probabilities may come from logits that are not. Into floats, which is faster on
    # CPU; their sum is exact up to 2**24.
    is_likelier = torch.gt(logits, logits.gather(1, token_ids), out=torch.empty_like(logits))
    ranks = 1 + is_likelier.sum(dim=-1)
    top_ids = top_tokens(logits, min(num_top_logprobs, logits.shape[1])).token_ids
    return RowLogprobs(
        rows=rows,
        logprobs=logprobs.gather(1, token_ids).squeeze(1),
        ranks=ranks.int(),
        top_token_ids=top_ids.int(),
        top_logprobs=logprobs.gather(1, top_ids),
    )
