"""How a frontend learns that its server shuts down or unloads its model, which Triton tells no model.

The launcher makes a file whose path travels in the environment, before it passes SIGTERM on. For a server that was
started without our launcher there are signs (measured on 2.51): with no HTTP request running it closes its HTTP
listener at once; with one running the listener stays, and closes every new connection without an answer.

An unload waits for the running requests and takes no new ones; the model's own readiness, asked for over HTTP like
any client's, is false from its first moment. A server without HTTP, or whose readiness needs a key, gives no sign.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from urllib.parse import quote

from deepinfer_backend._core import end_process_with
from deepinfer_backend.triton.listeners import Listener, ListenerFinder

DRAIN_FILE_VARIABLE = "DEEPINFER_DRAIN_FILE"
DRAIN_TIMEOUT_VARIABLE = "DEEPINFER_DRAIN_TIMEOUT_S"
DEFAULT_DRAIN_TIMEOUT_S = 6.0

_LISTENER_INTERVAL_S = 0.5
# Without waiting, until a listener calls the model ready: what is unloaded sooner gives no sign.
_NUM_FIRST_CHECKS = 100
_NUM_SIGNS_NEEDED = 2  # in a row: one may be chance, and a server that drains by mistake serves nobody
_PROBE_TIMEOUT_S = 1.0
_READY_STATUS = (b"HTTP/1.0 200", b"HTTP/1.1 200")


class Ending(Enum):
    """What comes to an end; the value is what a request that it cuts off is told."""

    NOTHING = ""
    MODEL = "the model is being unloaded"
    SERVER = "the server is shutting down"


class ShutdownSignal:
    """Watches for all signs; `look` is cheap enough for every round of the watcher, which alone calls it."""

    def __init__(
        self,
        server_pid: int,
        drain_file: Path | None,
        *,
        model_name: str,
        model_version: str,
        is_available: Callable[[], bool],
    ) -> None:
        """`is_available`: whether the model says of itself that it is; newer Tritons ask it for its readiness."""
        self._listener_finder = ListenerFinder(server_pid)
        self._drain_file = drain_file
        path = f"/v2/models/{quote(model_name, safe='')}/versions/{quote(model_version, safe='')}/ready"
        self._probe_request = f"GET {path} HTTP/1.0\r\n\r\n".encode()
        self._is_available = is_available
        self._listeners: set[Listener] = set()
        self._http_listeners: set[Listener] = set()  # those that answered a probe once
        self._ready_listeners: set[Listener] = set()  # those that said once that the model is ready
        self._last_sign = Ending.NOTHING
        self._num_signs = 0
        self._next_check_s = 0.0
        self._num_first_checks = 0
        self._ending = Ending.NOTHING
        self._ending_since_s = 0.0

    @classmethod
    def from_environment(cls, model_name: str, model_version: str, is_available: Callable[[], bool]) -> ShutdownSignal:
        path = os.environ.get(DRAIN_FILE_VARIABLE)
        return cls(
            os.getppid(),
            Path(path) if path else None,
            model_name=model_name,
            model_version=model_version,
            is_available=is_available,
        )

    def look(self, last_arrival_s: float | None) -> Ending:
        """Once SERVER, always SERVER. MODEL is taken back when a request arrives after it: an unload takes none.

        last_arrival_s: when the latest of the running requests came (time.monotonic); None when none runs, so that
            it matters less how soon we know.
        """
        if self._ending is Ending.SERVER:
            return self._ending
        if self._drain_file_exists():
            self._ending = Ending.SERVER
            return self._ending
        if self._ending is Ending.MODEL and last_arrival_s is not None and last_arrival_s > self._ending_since_s:
            self._ending, self._num_signs = Ending.NOTHING, 0
        self._look_at_server(is_busy=last_arrival_s is not None)
        return self._ending

    def _drain_file_exists(self) -> bool:
        return self._drain_file is not None and self._drain_file.exists()

    def _look_at_server(self, *, is_busy: bool) -> None:
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _LISTENER_INTERVAL_S
        sign = self._find_sign(is_busy)
        if self._listeners and not self._ready_listeners and self._num_first_checks < _NUM_FIRST_CHECKS:
            self._num_first_checks += 1
            self._next_check_s = now_s
        self._num_signs = self._num_signs + 1 if sign is self._last_sign else 1
        self._last_sign = sign
        # Readiness that comes back is that of the model's next load.
        if sign is not Ending.NOTHING and sign is not self._ending and self._num_signs >= _NUM_SIGNS_NEEDED:
            self._ending, self._ending_since_s = sign, now_s

    def _find_sign(self, is_busy: bool) -> Ending:
        try:
            listeners = self._listener_finder.find()
        except OSError:
            return Ending.NOTHING  # not ours to look at: only the file tells
        if not self._listeners <= listeners:
            return Ending.SERVER
        # The endpoints open one after the other, once all models are loaded: there may be more each time.
        self._listeners = listeners
        sign = Ending.NOTHING
        # An idle model asks until it knows whom to ask: its first request may still run when it is unloaded.
        asked = tuple(self._ready_listeners or listeners)
        for listener in asked if is_busy or not self._ready_listeners else ():
            was_available = self._is_available()
            answer = self._probe(listener)
            if answer is _Answer.CLOSED and listener in self._http_listeners:
                return Ending.SERVER
            if answer in (_Answer.READY, _Answer.NOT_READY):
                self._http_listeners.add(listener)
            if answer is _Answer.READY:
                self._ready_listeners.add(listener)
            # A model whose engine is restarting is not ready by its own word.
            is_told_apart = listener in self._ready_listeners and was_available and self._is_available()
            if answer is _Answer.NOT_READY and is_told_apart:
                sign = Ending.MODEL
        return sign

    def _probe(self, listener: Listener) -> _Answer:
        try:
            with socket.create_connection((listener.host, listener.port), _PROBE_TIMEOUT_S) as connection:
                connection.sendall(self._probe_request)
                with connection.makefile("rb") as stream:
                    answer = stream.read(len(_READY_STATUS[0]))
        except ConnectionError:
            return _Answer.CLOSED
        except OSError:
            return _Answer.OTHER
        if not answer:
            return _Answer.CLOSED
        if not answer.startswith(b"HTTP/"):
            return _Answer.OTHER
        return _Answer.READY if answer in _READY_STATUS else _Answer.NOT_READY


def drain_timeout_s() -> float:
    """Seconds that running requests get once the server shuts down."""
    return float(os.environ.get(DRAIN_TIMEOUT_VARIABLE, DEFAULT_DRAIN_TIMEOUT_S))


def end_with_server() -> None:
    """Ends this process as soon as its parent has: a stub whose server crashed hangs in its calls to it, perhaps with
    the interpreter's lock.

    The engine ends with the stub, by the pipe between them.
    """
    end_process_with(os.pidfd_open(os.getppid()))


class _Answer(Enum):
    READY = "ready"
    NOT_READY = "not ready"  # or not ours to know
    CLOSED = "closed"  # the connection, without a byte
    OTHER = "other"  # another protocol, too slow, or an error of ours
