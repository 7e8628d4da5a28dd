"""The responder: the one thread that sends, and the only user of the output processor."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from deepinfer_backend._core import RequestOutput
from deepinfer_backend.engine.engine_client import EngineOutputs
from deepinfer_backend.engine.messages import EngineRequest, RequestResult
from deepinfer_backend.engine.output_processor import ProcessedOutputs
from deepinfer_backend.errors import (
    DeepInferError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
    request_failed_error,
    shown,
)
from deepinfer_backend.outputs import TextDelta
from deepinfer_backend.triton.generate_request import CancelRequest, RequestObserver, TokenObserver
from deepinfer_backend.triton.response_stream import ResponseStream

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0


class TokensToText(Protocol):
    """What the responder needs of an OutputProcessor."""

    def add_request(self, request: EngineRequest, arrival_time_ns: int) -> None: ...
    def process(self, outputs: Sequence[RequestOutput], results: Sequence[RequestResult]) -> ProcessedOutputs: ...
    def remove_request(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Admit:
    """The request goes to the engine now; its outputs come later in the queue than this."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class _Fail:
    request_id: str
    error: DeepInferError


@dataclass(frozen=True, slots=True)
class _FailAll:
    error: DeepInferError


@dataclass(frozen=True, slots=True)
class _Cancel:
    request: CancelRequest


class _Stop:
    pass


_Event = _Admit | EngineOutputs | _Fail | _FailAll | _Cancel | _Stop


class Responder:
    """Owns every open ResponseStream, from `open` to its FINAL, and the thread that sends.

    Everything that may end a request arrives in one queue and is handled by one thread, so that each request has one
    history: admitted, deltas, end. All methods may be called from any thread; none waits for a client.

    What waits in the queue while a send takes long are the tokens of open requests, about 300 bytes each: at most their
    answers. It is merged when it is taken. Meanwhile no request starts, so that `max_queue_size` bounds their number.
    """

    def __init__(
        self,
        output_processor: TokensToText,
        abort_requests: Callable[[list[str]], None],
        abort_sequences: Callable[[list[tuple[str, int]]], None],
        forget_request: Callable[[str], None],
        observers: Sequence[RequestObserver],
        observe_tokens: TokenObserver,
        max_queue_size: int,
    ) -> None:
        """`forget_request`, `observers`: told of every request when it has ended, the former its id alone."""
        self._output_processor = output_processor
        self._abort_requests = abort_requests
        self._abort_sequences = abort_sequences
        self._forget_request = forget_request
        self._observers = observers
        self._observe_tokens = observe_tokens
        self._max_queue_size = max_queue_size
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._lock = threading.Lock()  # guards _open against a change while it is copied, and the size of _waiting
        self._open: dict[str, ResponseStream] = {}
        self._waiting: set[str] = set()  # ids of open requests of whose answers nothing has come yet
        self._admitted: set[str] = set()  # ids that the output processor knows; the thread's own
        self._thread = threading.Thread(target=self._run, name="deepinfer-responder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends what is still open with UNAVAILABLE, then the thread."""
        self._events.put(_FailAll(UnavailableError("the model is being unloaded")))
        self._events.put(_Stop())
        self._thread.join(_JOIN_TIMEOUT_S)

    def open(self, stream: ResponseStream) -> None:
        """From here on the stream gets its one FINAL, whatever happens.

        Raises:
            UnavailableError: it is to be answered, and `max_queue_size` others wait already; it is not open then.
        """
        with self._lock:
            if stream.is_to_be_answered:
                self._check_room()
                self._waiting.add(stream.request_id)
            self._open[stream.request_id] = stream

    def check_room(self) -> None:
        """Raises what `open` would now raise for a request that is to be answered."""
        with self._lock:
            self._check_room()

    def _check_room(self) -> None:
        if 0 < self._max_queue_size <= len(self._waiting):
            raise UnavailableError(
                f"{len(self._waiting)} requests wait for their first token, and max_queue_size is "
                f"{self._max_queue_size}; try again later",
                reason="queue_full",
            )

    def open_streams(self) -> list[ResponseStream]:
        with self._lock:
            return list(self._open.values())

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def admit(self, request: EngineRequest) -> None:
        """To be called before the engine gets the request."""
        self._events.put(_Admit(request))

    def respond(self, outputs: EngineOutputs) -> None:
        self._events.put(outputs)

    def fail(self, request_id: str, error: DeepInferError) -> None:
        self._events.put(_Fail(request_id, error))

    def cancel(self, request: CancelRequest) -> None:
        """Ends the streams of the client's requests with that id, then answers the request that asked for it."""
        self._events.put(_Cancel(request))

    def fail_all(self, error: DeepInferError) -> None:
        """Ends every stream that is open when the responder comes to it."""
        self._events.put(_FailAll(error))

    def _run(self) -> None:
        while True:
            events = self._next_events()
            try:
                self._handle(events)
            except Exception:
                logger.exception("the responder goes on after an error")  # without it nobody is answered any more
            if any(isinstance(event, _Stop) for event in events):
                return

    def _handle(self, events: list[_Event]) -> None:
        # In this order no answer that is already there is lost to an error that came later.
        for event in events:
            if isinstance(event, _Admit):
                try:
                    self._admit(event.request)
                except Exception as error:
                    self._end_alone(event.request.request_id, error)
        self._respond([event for event in events if isinstance(event, EngineOutputs)])
        for event in events:
            if isinstance(event, _Fail):
                self._end_with_error(event.request_id, event.error)
            elif isinstance(event, _Cancel):
                self._cancel(event.request)
            elif isinstance(event, _FailAll):
                for stream in self.open_streams():
                    self._end_with_error(stream.request_id, event.error)

    def _next_events(self) -> list[_Event]:
        """All that is there, at least one: an engine that outruns the senders gets fewer, longer responses."""
        events = [self._events.get()]
        with suppress(Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def _admit(self, request: EngineRequest) -> None:
        stream = self._open.get(request.request_id)
        if stream is not None:  # else it was cancelled meanwhile
            self._admitted.add(request.request_id)
            self._output_processor.add_request(request, stream.arrival_time_ns)

    def _respond(self, rounds: list[EngineOutputs]) -> None:
        outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
        results: defaultdict[str, list[RequestResult]] = defaultdict(list)
        for round_ in rounds:
            for output in round_.outputs:
                outputs[output.request_id].append(output)
            for result in round_.results:
                results[result.request_id].append(result)
        ids_to_abort: list[str] = []
        sequences_to_abort: list[tuple[str, int]] = []
        # Each request by itself, so that one that cannot be turned into text fails alone.
        for request_id in {**outputs, **results}:
            if request_id not in self._admitted:
                ids_to_abort.append(request_id)  # nobody waits for it: the engine need not compute it
                continue
            try:
                processed = self._output_processor.process(outputs.get(request_id, ()), results.get(request_id, ()))
                ids_to_abort.extend(processed.request_ids_to_abort)
                sequences_to_abort.extend(processed.sequences_to_abort)
                for _, delta in processed.deltas:
                    self._send(request_id, delta)
            except Exception as error:
                self._end_alone(request_id, error)
        for round_ in rounds:
            for failure in round_.failures:
                self._end_with_error(failure.request_id, failure.error, abort=False)
        if ids_to_abort:
            self._abort_requests(ids_to_abort)
        if sequences_to_abort:
            self._abort_sequences(sequences_to_abort)

    def _send(self, request_id: str, delta: TextDelta) -> None:
        stream = self._open.get(request_id)
        if stream is None:
            return
        if request_id in self._waiting:
            with self._lock:
                self._waiting.discard(request_id)
        self._observe_tokens(*stream.note(delta))
        stream.send_delta(delta)
        if delta.ends_request:
            self._forget(stream, None)
        elif stream.is_finished:  # its client is gone
            self._abort_requests([request_id])
            self._forget(stream, RequestCancelledError("the client takes no responses", reason="client"))

    def _end_with_error(self, request_id: str, error: DeepInferError, *, abort: bool = True) -> None:
        stream = self._open.get(request_id)
        if stream is None:
            return
        stream.fail(error)
        if abort and request_id in self._admitted:
            self._abort_requests([request_id])
        self._forget(stream, error)

    def _cancel(self, request: CancelRequest) -> None:
        asking = self._open.get(request.request_id)
        if asking is None:
            return
        streams = [stream for stream in self.open_streams() if stream.client_request_id == request.client_request_id]
        for stream in streams:
            error = RequestCancelledError("cancelled by the request's id", reason="request_id")
            self._end_with_error(stream.request_id, error)
        if not streams:
            error_ = InvalidRequestError(f"no request with the id {shown(request.client_request_id)} is running")
            self._end_with_error(request.request_id, error_)
        else:
            asking.acknowledge()
            self._forget(asking, None)

    def _forget(self, stream: ResponseStream, error: DeepInferError | None) -> None:
        request_id = stream.request_id
        with self._lock:
            self._open.pop(request_id, None)
            self._waiting.discard(request_id)
        self._forget_request(request_id)
        is_admitted = request_id in self._admitted
        self._admitted.discard(request_id)
        # It has its FINAL; what goes wrong from here on is nobody's error.
        try:
            if is_admitted:
                self._output_processor.remove_request(request_id)
            summary = stream.summary(error)
        except Exception:
            logger.exception("request %s: cannot be closed", request_id)
            return
        for observe in self._observers:
            try:
                observe(summary)
            except Exception:
                logger.exception("request %s: an observer failed", request_id)

    def _end_alone(self, request_id: str, error: Exception) -> None:
        """What was raised while a request was answered ends that request, and no other."""
        if not isinstance(error, DeepInferError):
            logger.error("request %s: cannot be answered", request_id, exc_info=error)
            error = request_failed_error(request_id)
        self._end_with_error(request_id, error)
