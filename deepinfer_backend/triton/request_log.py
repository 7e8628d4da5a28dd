"""The log's lines about requests: one when a request has ended and, if asked for, one when it came."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter

import numpy as np

from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.input_processor import Prompt, TextWithMedia
from deepinfer_backend.errors import (
    DeepInferError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
)
from deepinfer_backend.triton.generate_request import GenerateRequest, RequestSummary

logger = logging.getLogger(__name__)

MAX_REFUSALS_PER_SECOND = 20
"""Lines about requests that ended without a token through no fault of ours, of each kind; the rest are counted."""

_QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
_MAX_PROMPT_CHARS = 200
_MAX_PROMPT_TOKENS = 50
_MAX_PARAMS_CHARS = 1000
_NOT_OUR_FAULT = (InvalidRequestError, RequestCancelledError, UnavailableError)


class RequestLog:
    """Writes to the log. Any thread may call any method.

    What a client wrote is in it only with `shows_content`: the messages of INVALID_ARG quote it, so that these errors
    stand here with field and limit, but without the value; their clients have it.
    """

    def __init__(self, shows_content: bool) -> None:
        self._shows_content = shows_content
        self._lock = threading.Lock()  # guards all below
        self._second_began_s = 0.0
        self._num_logged: Counter[str] = Counter()  # since then, of each kind of refusal
        self._num_left_out: Counter[str] = Counter()

    def log_arrival(self, request: GenerateRequest) -> None:
        """The prompt's beginning and the parameters, if the log shows content."""
        if not self._shows_content:
            return
        params = repr(request.sampling_params.model_dump(exclude_unset=True, by_alias=True))
        logger.info(
            "request %s: prompt %s; stream %s, priority %d, timeout %s, queue_timeout %s, parameters %s",
            request.request_id,
            _beginning(request.prompt),
            request.stream,
            request.priority,
            _seconds(request.timeout_s),
            _seconds(request.queue_timeout_s),
            params if len(params) <= _MAX_PARAMS_CHARS else params[:_MAX_PARAMS_CHARS] + "…",
        )

    def log_end(self, request: RequestSummary) -> None:
        """A RequestObserver."""
        error = request.error
        is_refusal = isinstance(error, _NOT_OUR_FAULT) and not request.num_output_tokens
        if error is not None and is_refusal and not self._may_log(_kind(error)):
            return
        logger.log(
            _level(error),
            "request %s: %s; %d prompt tokens (%d cached), %d output tokens; queued %s, first token %s, total %s",
            request.request_id,
            self._ending(request),
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_output_tokens,
            _seconds_since_arrival(request, request.first_scheduled_time_ns),
            _seconds_since_arrival(request, request.first_token_time_ns),
            _seconds_since_arrival(request, request.end_time_ns),
        )

    def log_left_out(self, *, at_once: bool = False) -> None:
        """One line about the requests that had none, once their second is over; to be called now and then."""
        with self._lock:
            if not at_once and time.monotonic() - self._second_began_s < 1.0:
                return
            left_out, self._num_left_out = self._num_left_out, Counter()
        if left_out:
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(left_out.items()))
            logger.warning("%d more requests ended without a token: %s", left_out.total(), kinds)

    def _may_log(self, kind: str) -> bool:
        self.log_left_out()
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._second_began_s >= 1.0:
                self._second_began_s = now_s
                self._num_logged.clear()
            counter = self._num_logged if self._num_logged[kind] < MAX_REFUSALS_PER_SECOND else self._num_left_out
            counter[kind] += 1
            return counter is self._num_logged

    def _ending(self, request: RequestSummary) -> str:
        error = request.error
        if error is None:
            return ",".join(request.finish_reasons) or "cancelled others, as it asked"
        if isinstance(error, InvalidRequestError) and not self._shows_content:
            return f"{_kind(error)}: {_without_value(error.message)}"
        return f"{_kind(error)}: {error.message}"


def _kind(error: DeepInferError) -> str:
    return error.word if error.reason == error.word.lower() else f"{error.word} ({error.reason})"


def _without_value(message: str) -> str:
    """ "top_p is 0: must be …" → "top_p: must be …"; of a message of another form only what quotes nothing."""
    field, is_, rest = message.partition(" is ")
    if not is_ or " " in field:
        return _QUOTED.sub("…", message)
    return f"{field}: must {rest.rpartition(': must ')[2]}" if ": must " in rest else field


def _level(error: DeepInferError | None) -> int:
    if isinstance(error, UnavailableError):
        return logging.WARNING
    return logging.INFO if error is None or isinstance(error, _NOT_OUR_FAULT) else logging.ERROR


def _beginning(prompt: Prompt) -> str:
    """One line, escaped and cut."""
    if isinstance(prompt, Chat):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)
    if isinstance(prompt, TextWithMedia):
        prompt = prompt.text
    if isinstance(prompt, str):
        return repr(prompt[:_MAX_PROMPT_CHARS]) + f" of {len(prompt)} characters"
    return f"{np.asarray(prompt[:_MAX_PROMPT_TOKENS]).tolist()} of {len(prompt)} tokens"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:g} s"


def _seconds_since_arrival(request: RequestSummary, time_ns: int) -> str:
    return f"{(time_ns - request.arrival_time_ns) / 1e9:.3f} s" if time_ns else "-"
