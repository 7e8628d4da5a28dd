"""What can go wrong, as exceptions: each has a stable word that its message begins with.

The word is what an operator greps for, what a client on an old server matches on (Triton 2.51 has one HTTP
status for every error of a decoupled model), and the name of the Triton error code.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


class DeepInferError(Exception):
    """Base of all our errors. `str(error)` is "<word>: <message>" and is safe to show to a client."""

    word: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, reason: str = "") -> None:
        """`reason`: which kind of this error it is, as a label of a metric ("queue_full"); "" where there is one."""
        super().__init__(message)
        self.message = message
        self.reason = reason or self.word.lower()

    def __str__(self) -> str:
        return f"{self.word}: {self.message}"


class InvalidRequestError(DeepInferError, ValueError):
    """The request is wrong; the message names the field, the value and the limit."""

    word = "INVALID_ARG"


class ConfigError(DeepInferError, ValueError):
    """The engine's configuration is wrong; raised before any work starts."""

    word = "INVALID_ARG"


class UnsupportedModelError(DeepInferError, ValueError):
    """The model cannot run here; the message says which of its features we lack."""

    word = "UNSUPPORTED"


class UnavailableError(DeepInferError):
    """Not now: the engine is starting, restarting or shutting down, or a queue is full. Try again."""

    word = "UNAVAILABLE"


class RequestCancelledError(DeepInferError):
    """The client cancelled, left, or its deadline passed."""

    word = "CANCELLED"


class EngineError(DeepInferError):
    """A fault of ours; the log has the traceback under the request's id."""

    word = "INTERNAL"


class EngineDeadError(EngineError):
    """The engine process ended; what was in flight in it is lost."""


ERRORS_BY_WORD: dict[str, type[DeepInferError]] = {
    error.word: error for error in (InvalidRequestError, UnavailableError, RequestCancelledError, EngineError)
}
"""The exception that a word in a message from another process stands for."""

_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_IDS = 64


def request_failed_error(request_id: str) -> EngineError:
    """What the client of a request is told when the frontend itself is at fault."""
    return EngineError(f"request {request_id} failed; the server's log says why")


def step_failed_error(request_id: str) -> EngineError:
    """For a request of a step that failed; under its id the log has the traceback."""
    return EngineError(f"request {request_id}: a step of the engine failed; its log has the traceback")


def media_failed_error(request_id: str) -> EngineError:
    """For a request whose images or videos the model's vision part does not compute."""
    return EngineError(f"request {request_id}: its media cannot be encoded; the engine's log has the traceback")


def not_taken_in_error(request_id: str) -> EngineError:
    """For a request that failed on its way into the engine's queue."""
    return EngineError(f"request {request_id}: cannot be taken in; the engine's log has the traceback")


def shown(value: Any) -> str:
    """`value` as a message may show it: one line, escaped, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def shown_ids(request_ids: Iterable[str]) -> str:
    """For a log line: the first ids, and how many more there are."""
    ids = list(request_ids)
    more = f" and {len(ids) - _MAX_SHOWN_IDS} more" if len(ids) > _MAX_SHOWN_IDS else ""
    return ", ".join(ids[:_MAX_SHOWN_IDS]) + more


def nearest_name(name: str, known: Iterable[str]) -> str:
    """ " (did you mean `x`?)" for the known name closest to `name`, or "" when none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
