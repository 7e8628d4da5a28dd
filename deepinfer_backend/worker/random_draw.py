"""The random choice of a token: one entry, the CPU's kernel and CUDA's torch operations behind it.

Temperature, then min_p, top_k and top_p, each over what the one before left, then the inverse of the distribution
function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.worker.top_tokens import split_in_blocks
from deepinfer_backend.worker.truncation import Truncation, keep, least_logit

_DRAW_BLOCK = 128


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Which rows of the logits are sampled at random, and how; on the logits' device.

    rows: [num_random] int64. The rest has an element for each of the logits' rows: temperature above 0, min_p (0 is
    off) and top_p (1 is off) float32, top_k (0 is off) int32. The flags and max_top_k: as in `SamplingBatch`.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    any_min_p: bool
    any_top_k: bool
    any_top_p: bool
    max_top_k: int | None


def draw(logits: torch.Tensor, random: RandomRows, uniforms: torch.Tensor) -> torch.Tensor:
    """Float32 logits [num_rows, vocab_size], contiguous → a token for each random row, [num_random] int64.

    uniforms: [num_rows] float64 in [0, 1). A row's token depends on the row alone.
    """
    if logits.device.type == "cpu":
        token_ids: torch.Tensor = kernels.draw(logits, *_columns(random), uniforms)
        return token_ids
    return draw_in_torch(logits, random, uniforms)


def least_kept(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """[num_random, 1]: the smallest of each random row's `quotients` that is sampled; -inf where nothing is cut off."""
    if logits.device.type == "cpu":
        least: torch.Tensor = kernels.least_kept(logits, *_columns(random))
        return least[:, None]
    return least_kept_in_torch(logits, random)


def quotients(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """The random rows' logits over their temperatures, [num_random, vocab_size]."""
    return logits.index_select(0, random.rows).div_(random.temperature[random.rows, None])


def draw_in_torch(logits: torch.Tensor, random: RandomRows, uniforms: torch.Tensor) -> torch.Tensor:
    """`draw` on any device; CUDA's way."""
    scaled = quotients(logits, random)
    weights = scaled.softmax(dim=-1)
    least = least_logit(scaled, weights, _truncation(random))
    if least is not None:
        weights = keep(weights, scaled, least)
    return _invert(weights, uniforms[random.rows])


def least_kept_in_torch(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """`least_kept` on any device; CUDA's way."""
    scaled = quotients(logits, random)
    least = least_logit(scaled, scaled.softmax(dim=-1), _truncation(random))
    return torch.full_like(scaled[:, :1], -torch.inf) if least is None else least


def _columns(random: RandomRows) -> tuple[torch.Tensor, ...]:
    return random.rows, random.temperature, random.min_p, random.top_k, random.top_p


def _truncation(random: RandomRows) -> Truncation:
    rows = random.rows
    return Truncation(
        min_p=random.min_p[rows, None] if random.any_min_p else None,
        top_k=random.top_k[rows, None].long() if random.any_top_k else None,
        top_p=random.top_p[rows, None].double() if random.any_top_p else None,
        max_top_k=random.max_top_k,
    )


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Weights [num_rows, vocab_size], at least 0 → a token each [num_rows]: the inverse of the distribution function.

    Summed in float64, by blocks: first the block, then the token within it. A token without weight is never drawn.
    """
    blocks = split_in_blocks(weights, _DRAW_BLOCK, 0.0)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    reached = sums.cumsum(dim=-1)
    target = uniforms[:, None] * reached[:, -1:]
    block = _first_beyond(reached, target)
    target = (target - (reached - sums).gather(1, block)).clamp_(min=0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _DRAW_BLOCK)).squeeze(1)
    token_ids = block * _DRAW_BLOCK + _first_beyond(inside.cumsum(dim=-1, dtype=torch.float64), target)
    # Only a row in which nothing is allowed comes to the filling at the end.
    return token_ids.squeeze(1).clamp_(max=weights.shape[1] - 1)


def _first_beyond(reached: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]: where a running sum [num_rows, n] first exceeds the target [num_rows, 1].

    Where rounding made the target as large as the whole sum: where the sum is reached.
    """
    first = torch.searchsorted(reached, target, right=True)
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())
    return torch.minimum(first, last).clamp_(max=reached.shape[1] - 1)
