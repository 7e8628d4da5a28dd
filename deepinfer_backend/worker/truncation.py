"""min_p, top_k and top_p in torch operations, for CUDA: the least logit that each row keeps.

A threshold stands for the set of tokens, so that ties are kept together and no row needs its tokens in order for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.worker.top_tokens import split_in_blocks

_SUM_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Truncation:
    """Each [num_rows, 1] on the device; None where no row uses it.

    min_p: float32, 0 is off. top_k: int64, 0 is off. top_p: float64, 1 is off. max_top_k: the largest top_k.
    """

    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    max_top_k: int = 0


def least_logit(logits: torch.Tensor, weights: torch.Tensor, truncation: Truncation) -> torch.Tensor | None:
    """[num_rows, 1]: the smallest of a row's logits that is sampled; None where nothing is cut off.

    logits: float32 [num_rows, vocab_size]; weights: their softmax. top_k counts among all, top_p is a share of what
    min_p and top_k leave. A row's result depends on the row alone. The host never waits for the device to learn how
    many tokens a row needs in order: as many are as may be needed.
    """
    least = None
    if truncation.min_p is not None:
        least = logits.amax(dim=-1, keepdim=True) + truncation.min_p.log()
    if truncation.top_k is None and truncation.top_p is None:
        return least
    if least is None:
        least = torch.full_like(logits[:, :1], -torch.inf)
    size = _num_in_order(logits.shape[1], truncation)
    top = logits.topk(size, dim=-1) if size < logits.shape[1] else logits.sort(dim=-1, descending=True)
    if truncation.top_k is not None:
        last_of_k = top.values.gather(1, (truncation.top_k - 1).clamp(0, size - 1))
        least = torch.where(truncation.top_k > 0, torch.maximum(least, last_of_k), least)
    if truncation.top_p is not None:
        share = truncation.top_p
        if truncation.min_p is not None or truncation.top_k is not None:
            weights = keep(weights, logits, least)
            # A softmax is one as it is; summed again, it would differ from itself among other neighbours.
            share = torch.where(least > -torch.inf, share * _sum_of_rows(weights), share)
        reached = weights.gather(1, top.indices).cumsum(dim=-1, dtype=torch.float64)
        # A token is kept if those before it don't reach the share.
        last_kept = (reached[:, :-1] < share).sum(dim=-1, keepdim=True)
        is_cut = truncation.top_p < 1.0
        least = torch.where(is_cut, torch.maximum(least, top.values.gather(1, last_kept)), least)
    return least


def keep(weights: torch.Tensor, logits: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """The weights where the logit is kept, else 0."""
    return torch.where(logits >= least, weights, 0.0)


def _num_in_order(vocab_size: int, truncation: Truncation) -> int:
    if truncation.top_p is not None:
        return vocab_size
    return min(truncation.max_top_k, vocab_size)


def _sum_of_rows(weights: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1] float64. By blocks, since torch sums one long row alone in another order than several."""
    return split_in_blocks(weights, _SUM_BLOCK, 0.0).sum(dim=-1, dtype=torch.float64).sum(dim=-1, keepdim=True)
