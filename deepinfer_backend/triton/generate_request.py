"""What a client's request becomes, whichever interface it was written for, and what is known of it at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.input_processor import Prompt
from deepinfer_backend.engine.messages import EmbeddingParams, EngineInfo
from deepinfer_backend.errors import DeepInferError
from deepinfer_backend.outputs import TextDelta
from deepinfer_backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the client sent it, copied out of shared memory and checked as far as that is cheap.

    `request_id` is ours: unique among all clients of the engine, and begins with what a log may show of the client's
    own, which is `client_request_id` ("" if it gave none). `echo` stands in front of each text. `wants_…`: what the
    client is to be told. `build_tensors`: the tensors of one response, for one delta or for the whole sequences of a
    request in order of their index; called by one thread, for one response after the other. `bad_words_token_ids`: what
    the output must not contain besides the bad words of `sampling_params`. `priority` 0, no `timeout_s` and no
    `queue_timeout_s` stand for the configuration's defaults; both count from the request's arrival.
    """

    request_id: str
    client_request_id: str
    prompt: Prompt
    sampling_params: SamplingParams
    build_tensors: Callable[[Sequence[TextDelta]], list[Any]]
    embedding: EmbeddingParams | None = None
    stream: bool = False
    echo: str = ""
    priority: int = 0
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    wants_logprobs: bool = False
    wants_cumulative_logprob: bool = False
    wants_prompt_logprobs: bool = False
    bad_words_token_ids: Sequence[list[int]] = ()


CANCEL_INPUTS = frozenset({"cancel_request_id", "stop"})
"""Inputs of one interface or another without which no request is a CancelRequest."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Asks for the end of every open request of the model whose client gave it the id `client_request_id`."""

    request_id: str
    client_request_id: str


class RequestParser(Protocol):
    """Reads a Triton InferenceRequest of one interface.

    Raises:
        InvalidRequestError: the message names the field, the value and the limit.
    """

    def __call__(self, request: Any, request_id: str, client_request_id: str) -> GenerateRequest | CancelRequest: ...


class WireInterface(Protocol):
    """How one kind of client writes its requests and reads its answers: makes the parser, once the engine is known."""

    def __call__(self, tokenizer: Any, info: EngineInfo, config: EngineConfig) -> RequestParser: ...


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request that has ended. Times: nanoseconds of CLOCK_MONOTONIC, 0: never.

    `num_output_tokens` counts all its sequences, `finish_reasons` those that ended by themselves, in order of their
    index: "stop" or "length". `error` ended the request instead, None if nothing did. `time_per_output_token_s`:
    the mean over its tokens, without those that a sequence began with; None if there was no other.
    """

    request_id: str
    trace_context: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    arrival_time_ns: int
    first_scheduled_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int
    end_time_ns: int
    finish_reasons: tuple[str, ...]
    error: DeepInferError | None
    time_per_output_token_s: float | None = None


RequestObserver = Callable[[RequestSummary], None]
"""Told of each request when it has ended, by the responder's thread: it must be quick."""

TokenObserver = Callable[[int, float], None]
"""Told of a sequence's new tokens, all but those that it began with: how many, and the seconds that each took. By the
responder's thread: it must be very quick."""
