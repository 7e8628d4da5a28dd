"""What the requests of one step want of the sampler beyond what the scheduler packs, and what the step gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend.worker.device import device_to_host, host_to_device
from deepinfer_backend.worker.logit_edits import LogitEdits
from deepinfer_backend.worker.logprobs import RowLogprobs
from deepinfer_backend.worker.sampler import BeamCandidates


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The tokens after a span of a prompt's tokens, [num_tokens], and how many of the likeliest are wanted for each."""

    token_ids: NDArray[np.int32]
    num_top_logprobs: int


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Rows are those of logits that sample, ascending. Nothing of it costs anything where it is empty.

    logprob_rows want log-probabilities and at most `num_top_logprobs` of the likeliest tokens. candidate_rows are
    beams, and candidate_seq_ids their sequences; embedding_rows and embedding_seq_ids want the model's last hidden
    state. prompt_targets: one for each span of `prompt_logits`.
    """

    edits: LogitEdits | None = None
    logprob_rows: Sequence[int] = ()
    num_top_logprobs: int = 0
    candidate_rows: Sequence[int] = ()
    candidate_seq_ids: Sequence[int] = ()
    num_candidates: int = 0
    embedding_rows: Sequence[int] = ()
    embedding_seq_ids: Sequence[int] = ()
    prompt_targets: Sequence[PromptTargets] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gives, in the host's memory; valid once the device has passed the step.

    token_ids: [num_sampled, 1 + num_speculative_tokens] int32, of which the first num_tokens [num_sampled] int32 are
    new; drafts: [num_sampled, num_speculative_tokens] int32, what was proposed for the tokens after these, NO_TOKEN
    where nothing was; None without a drafter. embeddings: [num_embedding_rows, hidden_size] float32. prompt_logprobs:
    one for each span of the plan.
    """

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    drafts: torch.Tensor | None = None
    logprobs: RowLogprobs | None = None
    candidates: BeamCandidates | None = None
    embeddings: torch.Tensor | None = None
    prompt_logprobs: Sequence[RowLogprobs] = field(default_factory=list)


NO_PLAN = SamplingPlan()
EMPTY_RESULT = StepResult(torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32))


def row_tensor(rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """[num_rows] int64 on the device; None where there is none. Does not wait for the device."""
    return host_to_device(torch.tensor(rows), device) if rows else None


def logprobs_to_host(logprobs: RowLogprobs) -> RowLogprobs:
    return RowLogprobs(
        rows=device_to_host(logprobs.rows),
        logprobs=device_to_host(logprobs.logprobs),
        ranks=device_to_host(logprobs.ranks),
        top_token_ids=device_to_host(logprobs.top_token_ids),
        top_logprobs=device_to_host(logprobs.top_logprobs),
    )


def candidates_to_host(candidates: BeamCandidates) -> BeamCandidates:
    return BeamCandidates(
        rows=device_to_host(candidates.rows),
        token_ids=device_to_host(candidates.token_ids),
        logprobs=device_to_host(candidates.logprobs),
    )
