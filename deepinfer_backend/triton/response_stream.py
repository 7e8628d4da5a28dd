"""The answering side of one request: its sender, what was sent, and the one FINAL that ends it."""

from __future__ import annotations

import logging
import threading
import time
from enum import Enum
from typing import Any

import triton_python_backend_utils as pb_utils

from deepinfer_backend.errors import DeepInferError
from deepinfer_backend.outputs import TextDelta
from deepinfer_backend.triton.metrics import RequestLatency
from deepinfer_backend.triton.request import GenerateRequest
from deepinfer_backend.triton.response_tensors import build_output_tensors

logger = logging.getLogger(__name__)

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class State(Enum):
    OPEN = "open"
    FINISHED = "finished"  # FINAL was sent, or Triton refused to take it: nothing is ever sent again


class ResponseStream:
    """One request's way back to its client.

    Always true: the state leaves OPEN once, in `_send`, together with the only FINAL. `send_delta` and `fail` belong
    to the responder thread and do nothing once FINISHED; `is_cancelled` and `is_finished` may be called from any.
    A client that does not stream gets one response, which has the whole sequences in order of their index.
    """

    def __init__(self, request_id: str, sender: Any, request: GenerateRequest | None) -> None:
        """`request` is None when it could not be read: such a stream can only fail."""
        self.request_id = request_id
        self.arrival_time_ns = time.monotonic_ns()
        self.first_token_s: float | None = None
        self.deadline_s = self.arrival_s + request.timeout_s if request and request.timeout_s else None
        self._sender = sender
        self._request = request
        self._sequences: dict[int, TextDelta] = {}
        # Guards sender and state: Triton 2.51 crashes when a sender is asked is_cancelled() after its FINAL.
        self._lock = threading.Lock()
        self._state = State.OPEN

    @property
    def is_finished(self) -> bool:
        return self._state is State.FINISHED

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or left; costs 26-123 µs."""
        with self._lock:
            return self._state is State.OPEN and bool(self._sender.is_cancelled())

    @property
    def arrival_s(self) -> float:
        """In the time of `time.monotonic`."""
        return self.arrival_time_ns / 1e9

    def latency(self) -> RequestLatency:
        """How long it took until now."""
        first_s = None if self.first_token_s is None else self.first_token_s - self.arrival_s
        return RequestLatency(first_s, time.monotonic() - self.arrival_s)

    def send_delta(self, delta: TextDelta) -> None:
        """Sends it, or keeps it for a client that does not stream; the one that ends the request is the last."""
        request = self._request
        assert request is not None
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = time.monotonic()
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
        response = pb_utils.InferenceResponse(build_output_tensors(deltas, request.output_names))
        self._send(response, is_final=delta.ends_request)

    def fail(self, error: DeepInferError) -> None:
        """Ends the request with an error."""
        code = getattr(pb_utils.TritonError, error.word, pb_utils.TritonError.INTERNAL)
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), is_final=True)

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
