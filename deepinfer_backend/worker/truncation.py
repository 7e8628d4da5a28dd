"""min_p, top_k and top_p: the least logit that each row keeps.

A threshold stands for the set of tokens, so that ties are kept together and no row needs its tokens in order for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.worker.top_tokens import split_in_blocks

_PREFIX_SIZES = (64, 1_024, 8_192)
"""How many of a row's largest logits are put in order to find where it ends, before the whole row is."""
_SUM_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Truncation:
    """Each [num_rows, 1] on the device; None where no row uses it.

    min_p: float32, 0 is off. top_k: int64, 0 is off. top_p: float64, 1 is off. max_top_k: the largest top_k; None where
    the host does not know.
    """

    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    max_top_k: int | None = None

    def of_rows(self, rows: torch.Tensor) -> Truncation:
        min_p, top_k, top_p = (
            None if column is None else column[rows] for column in (self.min_p, self.top_k, self.top_p)
        )
        return Truncation(min_p, top_k, top_p, self.max_top_k)


def least_kept(logits: torch.Tensor, weights: torch.Tensor, truncation: Truncation) -> torch.Tensor | None:
    """[num_rows, 1]: the smallest of a row's logits that is sampled; None where nothing is cut off.

    logits: float32 [num_rows, vocab_size]; weights: their softmax. top_k counts among all, top_p is a share of what
    min_p and top_k leave. A row's result depends on the row alone. On CPU only the rows that a short prefix does not
    settle go on to a longer one; on CUDA that would make the host wait for the device, so that the longest that may be
    needed is taken at once.
    """
    if truncation.top_k is None and truncation.top_p is None:
        return None if truncation.min_p is None else _least_of_min_p(logits, truncation.min_p)
    first, *longer = _prefix_sizes(logits, truncation)
    least, is_settled = _settle(logits, weights, truncation, first)
    for size in longer:
        rows = is_settled.logical_not().nonzero().squeeze(1)
        if not len(rows):
            break
        least[rows], is_settled[rows] = _settle(logits[rows], weights[rows], truncation.of_rows(rows), size)
    return least


def keep(weights: torch.Tensor, logits: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """The weights where the logit is kept, else 0."""
    # Comparing into floats and multiplying is several times faster on CPU than anything with a mask of booleans.
    return torch.ge(logits, least, out=torch.empty_like(logits)).mul_(weights)


def _prefix_sizes(logits: torch.Tensor, truncation: Truncation) -> list[int]:
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        return [*(size for size in _PREFIX_SIZES if size < vocab_size), vocab_size]
    if truncation.top_p is not None or truncation.max_top_k is None:
        return [vocab_size]
    return [min(truncation.max_top_k, vocab_size)]


def _least_of_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    return logits.amax(dim=-1, keepdim=True) + min_p.log()


def _settle(
    logits: torch.Tensor, weights: torch.Tensor, truncation: Truncation, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least kept logits [num_rows, 1] as far as the `size` largest tell, and for which rows [num_rows] they do."""
    top = logits.topk(size, dim=-1) if size < logits.shape[1] else logits.sort(dim=-1, descending=True)
    is_settled = torch.ones_like(logits[:, :1], dtype=torch.bool)
    least = torch.full_like(logits[:, :1], -torch.inf)
    if truncation.min_p is not None:
        least = _least_of_min_p(logits, truncation.min_p)
    if truncation.top_k is not None:
        last_of_k = top.values.gather(1, (truncation.top_k - 1).clamp(0, size - 1))
        least = torch.where(truncation.top_k > 0, torch.maximum(least, last_of_k), least)
        is_settled = truncation.top_k <= size
    if truncation.top_p is not None:
        share = truncation.top_p
        if truncation.min_p is not None or truncation.top_k is not None:
            weights = keep(weights, logits, least)
            left = _sum_of_rows(weights)
            # A softmax is one as it is; summed again, it would differ from itself among other neighbours.
            share = torch.where(least > -torch.inf, share * left, share)
        reached = weights.gather(1, top.indices).cumsum(dim=-1, dtype=torch.float64)
        # A token is kept if those before it don't reach the share.
        last_kept = (reached[:, :-1] < share).sum(dim=-1, keepdim=True)
        is_cut = truncation.top_p < 1.0
        least = torch.where(is_cut, torch.maximum(least, top.values.gather(1, last_kept)), least)
        is_settled = is_settled & (~is_cut | (reached[:, -1:] >= share))
    return least, is_settled.squeeze(1)


def _sum_of_rows(weights: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1] float64. By blocks, since torch sums one long row alone in another order than several."""
    return split_in_blocks(weights, _SUM_BLOCK, 0.0).sum(dim=-1, dtype=torch.float64).sum(dim=-1, keepdim=True)
