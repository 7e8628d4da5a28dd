"""The answering side of one request: its sender, what was sent, and the one FINAL that ends it."""

from __future__ import annotations

import logging
import threading
import time
from enum import Enum
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from deepinfer_backend.errors import DeepInferError
from deepinfer_backend.outputs import RequestTimes, TextDelta
from deepinfer_backend.triton.generate_request import GenerateRequest, RequestSummary

logger = logging.getLogger(__name__)

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class State(Enum):
    OPEN = "open"
    FINISHED = "finished"  # FINAL was sent, or Triton refused to take it: nothing is ever sent again


class _Progress(NamedTuple):
    """Of one sequence, up to its last delta."""

    num_output_tokens: int
    times: RequestTimes
    finish_reason: str | None
    num_later_tokens: int  # all but those of the first delta
    later_tokens_ns: int  # what they took


class ResponseStream:
    """One request's way back to its client.

    Always true: the state leaves OPEN once, in `_send`, together with the only FINAL. `send_delta` and `fail` belong
    to the responder thread and do nothing once FINISHED; `is_cancelled` and `is_finished` may be called from any.
    A client that does not stream gets one response, which has the whole sequences in order of their index.
    """

    def __init__(self, request_id: str, sender: Any, request: GenerateRequest | None, trace_context: str = "") -> None:
        """`request` is None when it could not be read: such a stream can only fail.

        trace_context: Triton's, for spans of ours that go on from it; "" when the request is not traced.
        """
        self.request_id = request_id
        self.client_request_id = "" if request is None else request.client_request_id
        self.arrival_time_ns = time.monotonic_ns()
        self.deadline_s = self.arrival_s + request.timeout_s if request and request.timeout_s else None
        self._sender = sender
        self._request = request
        self._trace_context = trace_context
        self._sequences: dict[int, TextDelta] = {}
        self._progress: dict[int, _Progress] = {}
        self._num_prompt_tokens = self._num_cached_tokens = 0
        # Guards sender and state: Triton 2.51 crashes when a sender is asked is_cancelled() after its FINAL.
        self._lock = threading.Lock()
        self._state = State.OPEN

    @property
    def is_finished(self) -> bool:
        return self._state is State.FINISHED

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or left; costs 26-123 µs. False while a response is being sent: ask again."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._state is State.OPEN and bool(self._sender.is_cancelled())
        finally:
            self._lock.release()

    @property
    def arrival_s(self) -> float:
        """In the time of `time.monotonic`."""
        return self.arrival_time_ns / 1e9

    @property
    def is_to_be_answered(self) -> bool:
        """Whether it is a request's that could be read: it waits for its answer."""
        return self._request is not None

    def summary(self, error: DeepInferError | None) -> RequestSummary:
        """How it went until now, when it ends."""
        sequences = [self._progress[index] for index in sorted(self._progress)]
        times = [sequence.times for sequence in sequences]
        num_later_tokens = sum(sequence.num_later_tokens for sequence in sequences)
        later_tokens_s = sum(sequence.later_tokens_ns for sequence in sequences) / 1e9
        return RequestSummary(
            request_id=self.request_id,
            trace_context=self._trace_context,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=sum(sequence.num_output_tokens for sequence in sequences),
            arrival_time_ns=self.arrival_time_ns,
            first_scheduled_time_ns=min((each.first_scheduled_time_ns for each in times), default=0),
            first_token_time_ns=min((each.first_token_time_ns for each in times), default=0),
            last_token_time_ns=max((each.last_token_time_ns for each in times), default=0),
            end_time_ns=time.monotonic_ns(),
            finish_reasons=tuple(each.finish_reason for each in sequences if each.finish_reason is not None),
            error=error,
            time_per_output_token_s=later_tokens_s / num_later_tokens if num_later_tokens else None,
        )

    def note(self, delta: TextDelta) -> tuple[int, float]:
        """To be told of each delta before it is sent: how many tokens it has, and how many seconds each of them took.

        Of a sequence's first nothing is known: (0, 0.0).
        """
        self._num_prompt_tokens, self._num_cached_tokens = delta.num_prompt_tokens, delta.num_cached_tokens
        before = self._progress.get(delta.sequence_index)
        num_tokens = later_ns = num_later_tokens = later_tokens_ns = 0
        if before is not None:
            num_tokens = delta.num_output_tokens - before.num_output_tokens
            later_ns = delta.times.last_token_time_ns - before.times.last_token_time_ns
            num_later_tokens = before.num_later_tokens + num_tokens
            later_tokens_ns = before.later_tokens_ns + later_ns
        self._progress[delta.sequence_index] = _Progress(
            delta.num_output_tokens, delta.times, delta.finish_reason, num_later_tokens, later_tokens_ns
        )
        return num_tokens, later_ns / max(1, num_tokens) / 1e9

    def send_delta(self, delta: TextDelta) -> None:
        """Sends it, or keeps it for a client that does not stream; the one that ends the request is the last."""
        request = self._request
        assert request is not None
        deltas = [delta]
        if not request.stream:
            if delta.sequence_index in self._sequences:
                self._sequences[delta.sequence_index].append(delta)
            else:
                delta.text = request.echo + delta.text
                self._sequences[delta.sequence_index] = delta
            if not delta.ends_request:
                return
            deltas = [self._sequences[index] for index in sorted(self._sequences)]
        response = pb_utils.InferenceResponse(request.build_tensors(deltas))
        self._send(response, is_final=delta.ends_request)

    def acknowledge(self) -> None:
        """Ends the request with a response that says nothing but that what it asked for was done."""
        self._send(pb_utils.InferenceResponse([]), is_final=True)

    def fail(self, error: DeepInferError) -> None:
        """Ends the request with an error."""
        code = getattr(pb_utils.TritonError, error.word, pb_utils.TritonError.INTERNAL)
        try:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        except Exception:
            logger.exception("request %s: its error cannot be told", self.request_id)
            with self._lock:
                if self._state is State.OPEN:
                    self._close()
            return
        self._send(response, is_final=True)

    def _send(self, response: Any, *, is_final: bool) -> None:
        with self._lock:
            if self._state is State.FINISHED:
                return
            if is_final:
                self._state = State.FINISHED
            try:
                self._sender.send(response, flags=_FINAL if is_final else 0)
            except Exception:
                # A sender that does not take a response takes no other: whatever is wrong with it, others go on.
                logger.exception("request %s: cannot send a response", self.request_id)
                self._close()

    def _close(self) -> None:
        """Ends a stream whose response could not be sent; without a FINAL its client would wait for ever."""
        self._state = State.FINISHED
        try:
            self._sender.send(flags=_FINAL)
        except Exception:
            logger.exception("request %s: cannot be ended", self.request_id)
