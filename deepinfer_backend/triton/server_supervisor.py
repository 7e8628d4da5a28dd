"""Keeps a server serving: answers for a frontend or a server that has died, and starts the server again."""

from __future__ import annotations

import logging
import time
from typing import NoReturn

from deepinfer_backend.errors import EngineError, UnavailableError
from deepinfer_backend.triton.restart_budget import RESTART_WINDOW_S, RestartBudget
from deepinfer_backend.triton.server import TritonServer

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
_FIRST_RETRY_DELAY_S = 0.5
_MAX_RETRY_DELAY_S = 30.0


class ServerSupervisor:
    """Watches a server that somebody else starts and stops.

    A dead frontend's clients wait for ever: nothing but the end of their connections can answer them. So the whole
    server is ended, also where other models in it are well, and a new one takes its ports.
    """

    def __init__(self, server: TritonServer, *, max_restarts: int, ready_timeout_s: float) -> None:
        """`server` is ready; `max_restarts` within RESTART_WINDOW_S."""
        self._server = server
        self._budget = RestartBudget(max_restarts)
        self._ready_timeout_s = ready_timeout_s

    def run(self) -> NoReturn:
        """Until an exception of the caller's, such as that of a signal.

        Raises:
            EngineError: the server died too often.
        """
        while True:
            self._restart(self._wait_for_death())

    def _wait_for_death(self) -> str:
        """What has died."""
        while (status := self._server.wait(_POLL_INTERVAL_S)) is None:
            for frontend in self._server.dead_frontends():
                return f"the process of model {frontend.model_name} (pid {frontend.pid}) has died"
        return f"tritonserver has ended by itself, with status {status}"

    def _restart(self, death: str) -> None:
        """Returns when a new server is ready."""
        died_s = time.monotonic()
        self._server.kill()
        delay_s = 0.0
        while self._budget.take():
            logger.error(
                "%s: running requests were cut off; the server starts again (%d of at most %d times in %.0f s)",
                death,
                self._budget.num_taken,
                self._budget.max_restarts,
                RESTART_WINDOW_S,
            )
            time.sleep(delay_s)
            try:
                self._server.start()
                self._server.wait_ready(self._ready_timeout_s)
            except (EngineError, UnavailableError) as error:
                death = error.message
                self._server.kill()
                delay_s = min(max(2 * delay_s, _FIRST_RETRY_DELAY_S), _MAX_RETRY_DELAY_S)
            else:
                logger.warning("serving again, %.1f s later", time.monotonic() - died_s)
                return
        raise EngineError(
            f"{death}; giving up after {self._budget.max_restarts} restarts within {RESTART_WINDOW_S:.0f} s"
        )
