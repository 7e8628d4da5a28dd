"""How the frontend learns that its server is shutting down, or is dead, which Triton tells no model.

The launcher makes a file whose path travels in the environment, before it passes SIGTERM on. For a server that was
started without our launcher there are signs (measured on 2.51): with no HTTP request running it closes its HTTP
listener at once; with one running the listener stays, and closes every new connection without an answer.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from enum import Enum
from pathlib import Path

from deepinfer_backend.triton.listeners import Listener, find_listeners

DRAIN_FILE_VARIABLE = "DEEPINFER_DRAIN_FILE"
DRAIN_TIMEOUT_VARIABLE = "DEEPINFER_DRAIN_TIMEOUT_S"
DEFAULT_DRAIN_TIMEOUT_S = 6.0

_LISTENER_INTERVAL_S = 0.5
_NUM_SIGNS_NEEDED = 2  # in a row: one may be chance, and a server that drains by mistake serves nobody
_PROBE_TIMEOUT_S = 1.0
_HTTP = b"HTTP/"
_PROBE = b"GET /v2/health/live HTTP/1.0\r\n\r\n"


class ShutdownSignal:
    """Watches for all signs; `is_set` is cheap enough for every round of the watcher, which alone calls it."""

    def __init__(self, server_pid: int, drain_file: Path | None) -> None:
        self._server_pid = server_pid
        self._drain_file = drain_file
        self._listeners: set[Listener] = set()
        self._http_listeners: set[Listener] = set()  # those that answered a probe once
        self._num_signs = 0
        self._next_check_s = 0.0
        self._is_set = False

    @classmethod
    def from_environment(cls) -> ShutdownSignal:
        path = os.environ.get(DRAIN_FILE_VARIABLE)
        return cls(os.getppid(), Path(path) if path else None)

    def is_set(self, *, is_busy: bool) -> bool:
        """Stays true once it was. `is_busy`: requests are running, so that it matters how soon we know."""
        if not self._is_set:
            self._is_set = self._drain_file_exists() or self._is_closing(is_busy)
        return self._is_set

    def _drain_file_exists(self) -> bool:
        return self._drain_file is not None and self._drain_file.exists()

    def _is_closing(self, is_busy: bool) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + _LISTENER_INTERVAL_S
        self._num_signs = self._num_signs + 1 if self._see_sign(is_busy) else 0
        return self._num_signs >= _NUM_SIGNS_NEEDED

    def _see_sign(self, is_busy: bool) -> bool:
        try:
            listeners = find_listeners(self._server_pid)
        except OSError:
            return False  # not ours to look at: only the file tells
        if not self._listeners <= listeners:
            return True
        # The endpoints open one after the other, once all models are loaded: there may be more each time.
        self._listeners = listeners
        for listener in listeners if is_busy else ():
            answer = _probe(listener)
            if answer is _Answer.HTTP:
                self._http_listeners.add(listener)
            elif answer is _Answer.CLOSED and listener in self._http_listeners:
                return True
        return False


def drain_timeout_s() -> float:
    """Seconds that running requests get once the server shuts down."""
    return float(os.environ.get(DRAIN_TIMEOUT_VARIABLE, DEFAULT_DRAIN_TIMEOUT_S))


def end_with_server() -> None:
    """Ends this process as soon as its parent has: a stub whose server crashed hangs in its calls to it.

    The engine ends with the stub, by the pipe between them.
    """
    server = os.pidfd_open(os.getppid())

    def wait_for_end() -> None:
        select.select([server], [], [])
        os._exit(1)

    threading.Thread(target=wait_for_end, name="deepinfer-server-death", daemon=True).start()


class _Answer(Enum):
    HTTP = "http"
    CLOSED = "closed"  # the connection, without a byte
    OTHER = "other"  # another protocol, too slow, or an error of ours


def _probe(listener: Listener) -> _Answer:
    try:
        with socket.create_connection((listener.host, listener.port), _PROBE_TIMEOUT_S) as connection:
            connection.sendall(_PROBE)
            answer = connection.recv(len(_HTTP))
    except ConnectionError:
        return _Answer.CLOSED
    except OSError:
        return _Answer.OTHER
    if not answer:
        return _Answer.CLOSED
    return _Answer.HTTP if answer == _HTTP else _Answer.OTHER
