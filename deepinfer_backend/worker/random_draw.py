"""The choice of a token: one entry, the CPU's kernel and CUDA's torch operations behind it.

Temperature, then min_p, top_k and top_p, each over what the one before left, then the inverse of the distribution
function; the likeliest token where the temperature is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.worker.top_tokens import split_in_blocks, top_token
from deepinfer_backend.worker.truncation import Truncation, keep, least_logit

MIN_TEMPERATURE = 1e-5
"""Below it a quotient of float32 logits could overflow; the likeliest token has all the probability long before."""
_DRAW_BLOCK = 128


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of the logits is sampled; all tensors on the logits' device, [num_rows].

    temperature (0 is greedy), min_p (0 is off) and top_p (1 is off): float32; top_k (0 is off): int32; uniforms:
    float64 in [0, 1), the row's one random number. all_greedy, any_min_p, any_top_p and max_top_k, the largest top_k (0
    for none), say what nobody in the batch uses, so that it costs nothing on CUDA; on CPU the rows themselves say it.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor
    all_greedy: bool
    any_min_p: bool
    any_top_p: bool
    max_top_k: int


def sample_tokens(logits: torch.Tensor, rows: SamplingRows, token_ids: torch.Tensor) -> None:
    """Float32 logits [num_rows, vocab_size], contiguous → a token for each row, into token_ids [num_rows] int64.

    A row's token depends on the row alone.
    """
    if logits.device.type == "cpu":
        kernels.sample_tokens(logits, *_columns(rows), rows.uniforms, token_ids)
    else:
        sample_tokens_in_torch(logits, rows, token_ids)


def least_kept(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[num_rows, 1]: the smallest of each row's `quotients` that is sampled; -inf where nothing is cut off.

    Of no meaning in a greedy row.
    """
    if logits.device.type == "cpu":
        least: torch.Tensor = kernels.least_kept(logits, *_columns(rows))
        return least[:, None]
    return least_kept_in_torch(logits, rows)


def quotients(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The logits over their rows' temperatures, [num_rows, vocab_size]; those of a greedy row are finite, no more."""
    return logits / rows.temperature.clamp(min=MIN_TEMPERATURE)[:, None]


def sample_tokens_in_torch(logits: torch.Tensor, rows: SamplingRows, token_ids: torch.Tensor) -> None:
    """`sample_tokens` on any device; CUDA's way."""
    likeliest = top_token(logits)
    if rows.all_greedy:
        token_ids.copy_(likeliest)
        return
    scaled = quotients(logits, rows)
    weights = scaled.softmax(dim=-1)
    least = least_logit(scaled, weights, _truncation(rows))
    if least is not None:
        weights = keep(weights, scaled, least)
    torch.where(rows.temperature > 0, _invert(weights, rows.uniforms), likeliest, out=token_ids)


def least_kept_in_torch(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`least_kept` on any device; CUDA's way."""
    scaled = quotients(logits, rows)
    least = least_logit(scaled, scaled.softmax(dim=-1), _truncation(rows))
    return torch.full_like(scaled[:, :1], -torch.inf) if least is None else least


def _columns(rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    return rows.temperature, rows.min_p, rows.top_k, rows.top_p


def _truncation(rows: SamplingRows) -> Truncation:
    return Truncation(
        min_p=rows.min_p[:, None] if rows.any_min_p else None,
        top_k=rows.top_k[:, None].long() if rows.max_top_k else None,
        top_p=rows.top_p[:, None].double() if rows.any_top_p else None,
        max_top_k=rows.max_top_k,
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
