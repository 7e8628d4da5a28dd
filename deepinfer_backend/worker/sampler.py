"""Logits → tokens, for the whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of a step's logits is sampled; all tensors on the device, [num_rows] unless said.

    random_rows: [num_random] the rows with temperature > 0; the others are greedy. top_k: 0 is off. uniforms: float64
    in [0, 1), the row's one random number. banned_rows, banned_token_ids: [num_banned] what must not be sampled.
    max_top_k, any_top_p say what nobody in the batch uses, so that it costs nothing.
    """

    random_rows: torch.Tensor | None
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor
    banned_rows: torch.Tensor
    banned_token_ids: torch.Tensor
    any_top_k: bool
    any_top_p: bool


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits [num_rows, vocab_size] → token ids [num_rows] int32. May change `logits`.

    A random row takes one uniform number through the inverse of its distribution function, so that its token depends
    on its logits and that number alone, whatever else is in the batch.
    """
    if len(batch.banned_rows):
        logits[batch.banned_rows, batch.banned_token_ids] = -torch.inf
    tokens = logits.argmax(dim=-1)
    rows = batch.random_rows
    if rows is not None:
        tokens[rows] = _sample_random(logits[rows], batch, rows)
    return tokens.int()


def _sample_random(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    logits = logits.float() / batch.temperature[rows, None]
    if batch.any_top_k or batch.any_top_p:
        logits = _keep_top(logits, batch, rows)
    distribution = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = batch.uniforms[rows, None] * distribution[:, -1:]
    return torch.searchsorted(distribution, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def _keep_top(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    """-inf for all but the top_k likeliest and, among those, the fewest whose probabilities reach top_p."""
    ordered = logits.sort(dim=-1, descending=True).values
    num_kept = torch.full_like(rows, logits.shape[1])
    if batch.any_top_k:
        top_k = batch.top_k[rows].long()
        num_kept = torch.where(top_k > 0, top_k.clamp(max=logits.shape[1]), num_kept)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(ranks >= num_kept[:, None], -torch.inf)
    if batch.any_top_p:
        probability_before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        probability_before[:, 0] = 0.0
        num_kept = (probability_before < batch.top_p[rows, None]).logical_and(ordered > -torch.inf).sum(dim=-1)
    least_kept = ordered.gather(1, (num_kept - 1).clamp(min=0)[:, None])
    return logits.masked_fill(logits < least_kept, -torch.inf)
