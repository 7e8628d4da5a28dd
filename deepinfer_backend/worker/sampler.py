"""Logits → tokens, for the whole batch at once.

The order is vLLM's: what the request allows, bans and adds (`LogitEdits`), then temperature, min_p, top_k, top_p, each
over what the one before left. Log-probabilities are those of the logits before all that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.ops.verify_drafts import NO_TOKEN
from deepinfer_backend.worker.logit_edits import LogitEdits
from deepinfer_backend.worker.logprobs import RowLogprobs, logprobs_of
from deepinfer_backend.worker.random_draw import SamplingRows, least_kept, quotients, sample_tokens
from deepinfer_backend.worker.top_tokens import top_tokens


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of a step's logits is sampled; all tensors on the device.

    token_ids: [num_rows] int64, where the sampled tokens go. banned_rows, banned_token_ids, banned_until: [num_banned]
    int64, what must not be sampled while row_output_indices [num_rows] int64 is below that.

    logprob_rows: [m] int64 rows that ask for log-probabilities, and the most likeliest tokens that one of them asks
    for. candidate_rows: [b] int64 rows of beam search, and how many candidates each gets.
    """

    rows: SamplingRows
    token_ids: torch.Tensor
    banned_rows: torch.Tensor
    banned_token_ids: torch.Tensor
    banned_until: torch.Tensor
    row_output_indices: torch.Tensor
    edits: LogitEdits | None = None
    logprob_rows: torch.Tensor | None = None
    num_top_logprobs: int = 0
    candidate_rows: torch.Tensor | None = None
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """What may follow each of b beams: token_ids [b, k] int32 and their logprobs [b, k] float32, the best first.

    Log-probabilities are those of the model's own distribution with the request's edits applied to them, and not
    normalized again. rows: [b] int64, the beams' rows.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """What a step sampled, on the device. token_ids: [num_rows] int64; the rest only where a row asked for it.

    A row whose edits leave nothing to sample has NO_TOKEN.
    """

    token_ids: torch.Tensor
    logprobs: RowLogprobs | None = None
    candidates: BeamCandidates | None = None


def sample_batch(logits: torch.Tensor, batch: SamplingBatch) -> SampledBatch:
    """Logits [num_rows, vocab_size] → one token a row, in `batch.token_ids`, and what else the rows asked for.

    May change `logits`.

    A random row takes one uniform number through the inverse of its distribution function, so that its token depends
    on its logits and that number alone, whatever else is in the batch.
    """
    logits = logits.float().contiguous()
    logprob_rows = batch.logprob_rows
    raw_logits = None if logprob_rows is None else logits.index_select(0, logprob_rows)
    candidate_rows = batch.candidate_rows
    raw_beams = None if candidate_rows is None else logits.index_select(0, candidate_rows)
    _edit(logits, batch)
    candidates = None
    if raw_beams is not None and candidate_rows is not None:
        candidates = _beam_candidates(raw_beams, logits, batch.num_candidates, candidate_rows)
    limited_rows = None if batch.edits is None else batch.edits.limited_rows(logits.device)
    is_left = None
    if limited_rows is not None:
        is_left = logits.index_select(0, limited_rows).amax(dim=-1) > -torch.inf
    token_ids = batch.token_ids
    sample_tokens(logits, batch.rows, token_ids)
    logprobs = None
    if raw_logits is not None and logprob_rows is not None:
        logprobs = logprobs_of(raw_logits, token_ids[logprob_rows], batch.num_top_logprobs, logprob_rows)
    if limited_rows is not None and is_left is not None:
        token_ids[limited_rows] = torch.where(is_left, token_ids[limited_rows], NO_TOKEN)
    return SampledBatch(token_ids, logprobs, candidates)


def processed_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits [num_rows, vocab_size] as tokens are drawn from them: float32, -inf for what is not sampled.

    For whoever wants to look: `sample_batch` makes the same choice without building them. May change `logits`.
    """
    logits = logits.float().contiguous()
    _edit(logits, batch)
    scaled = quotients(logits, batch.rows)
    kept = scaled.masked_fill(scaled < least_kept(logits, batch.rows), -torch.inf)
    return torch.where(batch.rows.temperature[:, None] > 0, kept, logits)


def _edit(logits: torch.Tensor, batch: SamplingBatch) -> None:
    if len(batch.banned_rows):
        places = (batch.banned_rows, batch.banned_token_ids)
        is_banned = batch.row_output_indices[batch.banned_rows] < batch.banned_until
        logits[places] = torch.where(is_banned, -torch.inf, logits[places])
    if batch.edits is not None:
        batch.edits.apply(logits)


def _beam_candidates(
    raw_logits: torch.Tensor, logits: torch.Tensor, num_candidates: int, rows: torch.Tensor
) -> BeamCandidates:
    """raw_logits: [num_candidate_rows, vocab_size] before the edits; logits: the whole batch's after them."""
    top = top_tokens(logits.index_select(0, rows), min(num_candidates, logits.shape[1]))
    # Not by logsumexp: its rounding depends on how many rows there are.
    raw_logprobs = raw_logits.log_softmax(dim=-1).gather(1, top.token_ids)
    change = top.values - raw_logits.gather(1, top.token_ids)
    return BeamCandidates(rows, top.token_ids.int(), raw_logprobs + change)
