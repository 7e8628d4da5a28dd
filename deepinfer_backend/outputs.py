"""What callers receive: pieces of text with their tokens, log-probabilities and counts, and how a sequence ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of the model's own probability of a token, and its rank among all (1: the likeliest)."""

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

    The texts of all deltas joined are the sequence's text, as are the token ids and `logprobs` (None unless asked
    for). `finish_reason` is set on the last one only: "stop" or "length". `stop_reason` is the token id or the string
    that stopped it, if one did. `cumulative_logprob` and `num_output_tokens` count from the sequence's beginning.
    `prompt_logprobs`: one entry per prompt token, None for the first; on the first delta, if asked for. `embedding`:
    the answer to an embedding request, on its only delta.
    """

    sequence_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    embedding: list[float] | None = None
    times: RequestTimes = RequestTimes()
