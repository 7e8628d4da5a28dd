"""The watcher: sees cancellation, deadlines, an unload and the server's shutdown, and publishes metrics."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from deepinfer_backend.errors import RequestCancelledError, UnavailableError
from deepinfer_backend.triton.metrics import ModelMetrics
from deepinfer_backend.triton.request_log import RequestLog
from deepinfer_backend.triton.responder import Responder
from deepinfer_backend.triton.response_stream import ResponseStream
from deepinfer_backend.triton.shutdown_signal import Ending, ShutdownSignal

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.09  # asking a sender whether its client is gone costs up to 0.1 ms
METRICS_INTERVAL_S = 0.25
_JOIN_TIMEOUT_S = 5.0


class Watcher:
    """Owns a thread that looks at every open stream, queued or running, each WATCH_INTERVAL_S."""

    def __init__(
        self,
        responder: Responder,
        metrics: ModelMetrics,
        request_log: RequestLog,
        shutdown_signal: ShutdownSignal,
        drain_timeout_s: float,
        on_draining: Callable[[], None],
    ) -> None:
        self._responder = responder
        self._metrics = metrics
        self._request_log = request_log
        self._shutdown_signal = shutdown_signal
        self._drain_timeout_s = drain_timeout_s
        self._on_draining = on_draining
        self._ending = Ending.NOTHING
        self._drain_deadline_s = math.inf
        self._next_metrics_s = 0.0
        self._failed_ids: set[str] = set()  # of open streams
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepinfer-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(WATCH_INTERVAL_S):
            for look in (
                self._look_at_streams,
                self._look_for_ending,
                self._publish_metrics,
                self._request_log.log_left_out,
            ):
                try:
                    look()
                except Exception:
                    logger.exception("the watcher goes on after an error")

    def _look_at_streams(self) -> None:
        streams = self._responder.open_streams()
        # Once is enough, however long the responder takes to come to it.
        self._failed_ids.intersection_update(stream.request_id for stream in streams)
        for stream in streams:
            if stream.request_id not in self._failed_ids and (error := self._reason_to_end(stream)) is not None:
                self._failed_ids.add(stream.request_id)
                self._responder.fail(stream.request_id, error)

    def _reason_to_end(self, stream: ResponseStream) -> RequestCancelledError | None:
        if stream.is_cancelled():
            return RequestCancelledError("the client cancelled or left", reason="client")
        if stream.deadline_s is not None and time.monotonic() > stream.deadline_s:
            timeout_s = stream.deadline_s - stream.arrival_s
            return RequestCancelledError(f"timeout of {timeout_s:g} s passed before the answer", reason="timeout")
        return None

    def _look_for_ending(self) -> None:
        streams = self._responder.open_streams()
        ending = self._shutdown_signal.look(max((stream.arrival_s for stream in streams), default=None))
        if ending is not self._ending:
            self._begin(ending)
        if streams and time.monotonic() > self._drain_deadline_s:
            self._responder.fail_all(UnavailableError(ending.value))

    def _begin(self, ending: Ending) -> None:
        previous, self._ending = self._ending, ending
        if ending is Ending.NOTHING:
            logger.warning("the model was not unloaded after all: running requests go on")
            self._drain_deadline_s = math.inf
            return
        logger.info("%s: running requests get %g s", ending.value, self._drain_timeout_s)
        if previous is Ending.NOTHING:
            self._drain_deadline_s = time.monotonic() + self._drain_timeout_s
        if ending is Ending.SERVER:
            self._on_draining()  # of an unloaded model Triton itself refuses new requests

    def _publish_metrics(self) -> None:
        if time.monotonic() >= self._next_metrics_s:
            has_more = self._metrics.publish()
            self._next_metrics_s = 0.0 if has_more else time.monotonic() + METRICS_INTERVAL_S
