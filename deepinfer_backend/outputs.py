"""What callers receive: pieces of text with their tokens, log-probabilities and counts, and how a sequence ended."""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of probability 0: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of the model's own probability of a token, and its rank among all.

    Rank 1 is the likeliest; 0 is not known, as in a beam.
    """

    token_id: int
    logprob: float
    rank: int
    decoded_token: str = ""


Logprobs = list[TokenLogprob]
"""Of one position: the token that stands there first, then the k likeliest, best first."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to one sequence, in nanoseconds of CLOCK_MONOTONIC; 0: not yet."""

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0


@dataclass(slots=True)
class TextDelta:
    """What is new of one sequence since its last delta.

    The texts of all deltas joined are the sequence's text, as are the token ids and `logprobs` (None unless asked for;
    a beam has the tokens' own without being asked). Each token has its entry in `logprobs`, also one whose text a stop
    string cut off. `finish_reason` is set on the sequence's last one only: "stop" or "length". `stop_reason` is the
    token id or the string that stopped it, if one did. `ends_request`: no delta of any of the request's sequences
    follows. `cumulative_logprob` (0 unless asked for) and `num_output_tokens` count from the sequence's beginning.
    So do `num_draft_tokens`, which speculation proposed for the sequence and a step verified, and
    `num_accepted_draft_tokens`, those of them that came out. `num_held_tokens`: how many of the sequence's last tokens
    have no text in the deltas so far, because a character is incomplete; 0 on its last delta. `prompt_logprobs`: one
    entry per prompt token, None for the first; on the request's first delta, if asked for. `embedding`: the answer to
    an embedding request, on its only delta.
    """

    sequence_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ends_request: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_held_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    embedding: list[float] | None = None
    times: RequestTimes = RequestTimes()

    def append(self, later: TextDelta) -> None:
        """Adds the sequence's next delta to this one: both together, as one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.ends_request = later.ends_request
        self.num_output_tokens, self.num_held_tokens = later.num_output_tokens, later.num_held_tokens
        self.num_draft_tokens, self.num_accepted_draft_tokens = later.num_draft_tokens, later.num_accepted_draft_tokens
        self.cumulative_logprob = later.cumulative_logprob
        self.times = later.times


@dataclass(frozen=True, slots=True)
class CompletionSequence:
    """One whole answer. `logprobs`: one entry per token, None unless asked for, as is `cumulative_logprob`.

    `num_draft_tokens`, `num_accepted_draft_tokens`: as in `TextDelta`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str
    stop_reason: int | str | None
    times: RequestTimes
    num_draft_tokens: int
    num_accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """All that one prompt brought; `sequences` in order of their index. `prompt_logprobs` as in `TextDelta`."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    prompt_logprobs: list[Logprobs | None] | None
    sequences: list[CompletionSequence]
