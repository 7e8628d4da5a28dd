"""Keeps an engine alive: passes its outputs on, and starts a new one when it dies."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineClient, EngineOutputs
from deepinfer_backend.engine.messages import EngineInfo, EngineRequest
from deepinfer_backend.errors import EngineDeadError, UnavailableError
from deepinfer_backend.triton.restart_budget import RESTART_WINDOW_S, RestartBudget

logger = logging.getLogger(__name__)

_FIRST_RETRY_DELAY_S = 0.5
_MAX_RETRY_DELAY_S = 30.0
_POLL_TIMEOUT_S = 0.2
_JOIN_TIMEOUT_S = 6.0  # an engine's own close() may take 5


class EngineState(Enum):
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"  # too many restarts: for good
    CLOSED = "closed"


class _Watchdog:
    """Whether an engine that has work is silent for too long. An engine with work tells of it after each step.

    An engine that others own tells only them of its work, and is theirs to watch.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._is_told = False
        self._is_busy = False
        self._last_message_s = time.monotonic()

    def expect_work(self) -> None:
        """It was given some: also one that had nothing to do when it got stuck is missed. From any thread."""
        if not self._is_busy:
            self._last_message_s = time.monotonic()
            self._is_busy = True

    def is_stuck(self, outputs: EngineOutputs | None) -> bool:
        """To be asked with whatever the engine told last; None: nothing."""
        now_s = time.monotonic()
        if outputs is None:
            return self._is_told and self._is_busy and now_s - self._last_message_s > self.timeout_s
        self._last_message_s = now_s
        if outputs.stats is not None:
            self._is_told = True
            self._is_busy = outputs.stats.num_running + outputs.stats.num_waiting > 0
        return False


class EngineSupervisor:
    """Owns the engine client and the thread that reads from it.

    `add_request` and the two that abort may be called from any thread. The callbacks run on the supervisor's thread:
    `on_outputs` for each round; `on_death` once for each death, after which no output of that engine follows;
    `on_failed` when it has given up.
    """

    def __init__(
        self,
        start_engine: Callable[[], EngineClient],
        *,
        name: str,
        on_outputs: Callable[[EngineOutputs], None],
        on_death: Callable[[EngineDeadError], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Starts the first engine; raises what that raises. name: in the log."""
        self._name = name
        self._start_engine = start_engine
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_failed = on_failed
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards _client, _watchdog, _state and info
        self._client = start_engine()
        self._state = EngineState.RUNNING
        self.info: EngineInfo = self._client.info
        config = EngineConfig(**self.info.config)
        self._restart_budget = RestartBudget(config.max_engine_restarts)
        self._watchdog = _Watchdog(config.step_timeout_s)
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends engine and thread, in bounded time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)
        with self._lock:
            self._state = EngineState.CLOSED
            client = self._client
        client.close()

    def add_request(self, request: EngineRequest) -> None:
        """Raises UnavailableError while there is no engine to take it."""
        with self._lock:
            if self._state is not EngineState.RUNNING:
                raise UnavailableError(_UNAVAILABLE_BECAUSE[self._state])
            client, watchdog = self._client, self._watchdog
        watchdog.expect_work()
        try:
            client.add_request(request)
        except EngineDeadError:
            raise UnavailableError(_UNAVAILABLE_BECAUSE[EngineState.RESTARTING]) from None

    def abort_requests(self, request_ids: list[str]) -> None:
        """A dead engine has none to abort."""
        self._tell(lambda client: client.abort_requests(request_ids))

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        """(request id, sequence index) of each; the rest of their requests goes on."""
        self._tell(lambda client: client.abort_sequences(sequences))

    def forget_request(self, request_id: str) -> None:
        self._client.forget_request(request_id)

    def check_available(self) -> None:
        """Raises UnavailableError while there is no engine; so that a client need not wait in a queue for that."""
        state = self._state
        if state is not EngineState.RUNNING:
            raise UnavailableError(_UNAVAILABLE_BECAUSE[state])

    def is_given_up(self) -> bool:
        return self._state is EngineState.FAILED

    def is_available(self) -> bool:
        """Whether there is an engine."""
        return self._state is EngineState.RUNNING

    def _tell(self, tell: Callable[[EngineClient], None]) -> None:
        with self._lock:
            if self._state is not EngineState.RUNNING:
                return
            client = self._client
        try:
            tell(client)
        except EngineDeadError:
            logger.debug("nothing to abort: the engine has ended")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                outputs = self._client.get_outputs(_POLL_TIMEOUT_S)
                if self._watchdog.is_stuck(outputs):
                    logger.error(
                        "%s is stuck, without a step for %g s, and is ended", self._name, self._watchdog.timeout_s
                    )
                    with self._lock:
                        self._state = EngineState.RESTARTING
                    self._client.kill()
                if outputs is not None:
                    self._on_outputs(outputs)
            except Exception as error:
                if self._stopping.is_set():
                    return
                death = error
                if not isinstance(death, EngineDeadError):
                    death = EngineDeadError("the engine's answer is garbled")
                logger.error("%s has ended: %s", self._name, death.message, exc_info=death is not error)
                if not self._replace_engine(death):
                    return

    def _replace_engine(self, death: EngineDeadError) -> bool:
        """Answers for the dead engine and starts another; False when there is none any more."""
        with self._lock:
            self._state = EngineState.RESTARTING
        self._on_death(death)
        self._client.close()
        delay_s = 0.0
        while not self._stopping.wait(delay_s):
            if not self._restart_budget.take():
                with self._lock:
                    self._state = EngineState.FAILED
                logger.error(
                    "%s is given up: %d restarts within %.0f s",
                    self._name,
                    self._restart_budget.max_restarts,
                    RESTART_WINDOW_S,
                )
                self._on_failed()
                return False
            try:
                client = self._start_engine()
            except Exception:
                logger.exception("%s does not start", self._name)
                delay_s = min(max(2 * delay_s, _FIRST_RETRY_DELAY_S), _MAX_RETRY_DELAY_S)
                continue
            with self._lock:
                self._watchdog = _Watchdog(self._watchdog.timeout_s)
                self._client, self.info, self._state = client, client.info, EngineState.RUNNING
            logger.warning("%s is running again", self._name)
            return True
        return False


_UNAVAILABLE_BECAUSE = {
    EngineState.RESTARTING: "the engine is restarting; try again in a few seconds",
    EngineState.FAILED: "the engine failed too often and is not restarted any more; the server's log says why",
    EngineState.CLOSED: "the model is being unloaded",
}
