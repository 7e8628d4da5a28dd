"""Starts and stops one tritonserver, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from deepinfer_backend.errors import EngineError, UnavailableError
from deepinfer_backend.triton.frontend_registry import (
    FRONTENDS_FOLDER_VARIABLE,
    DeadFrontend,
    find_dead_frontends,
    read_failed_starts,
)
from deepinfer_backend.triton.server_layout import find_server
from deepinfer_backend.triton.shutdown_signal import (
    DEFAULT_DRAIN_TIMEOUT_S,
    DRAIN_FILE_VARIABLE,
    DRAIN_TIMEOUT_VARIABLE,
)

logger = logging.getLogger(__name__)

# After the drain: the last FINALs, then the engine, which closes within 5 s.
_CLOSE_TIME_S = 6.0
# The path of a socket below it may have 107 characters.
_MAX_TMPDIR_LENGTH = 50
_POLL_INTERVAL_S = 0.05
_HTTP_TIMEOUT_S = 2.0
_NUM_LOG_LINES_SHOWN = 30
_MAX_LOG_TAIL_BYTES = 64 * 1024
_LOG_NOISE = re.compile(r"[+|]|I\d{4} ")  # tables and what went well
_SHM_FOLDER = Path("/dev/shm")
# Triton's advice for servers that strangers can reach; nothing of ours needs these.
_RESTRICTED_APIS = "shared-memory,trace,logging"
_TRACE_EVERY_REQUEST = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1")


class TritonServer:
    """One tritonserver process and all that it starts: stubs, engines, shared-memory regions, a work folder.

    They live in a session of their own, so that a terminal's Ctrl-C reaches the launcher alone and `stop` finds every
    process of theirs, also when the server itself was killed. Used by one thread.
    """

    def __init__(
        self,
        model_repository: Path,
        *,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        log_file: Path | None = None,
        explicit_model_control: bool = False,
        drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S,
        otlp_traces_endpoint: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            log_file: where the server's log goes; None is this process's standard error.
            explicit_model_control: models may be loaded and unloaded through the API, and one whose engine fails for
                good is unloaded; all models of the repository are loaded at start either way.
            drain_timeout_s: what running requests get once the server is told to stop.
            otlp_traces_endpoint: an OpenTelemetry collector that gets spans of every request; None traces none.
            environment: additions to this process's environment.
        """
        self.model_repository = model_repository
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.metrics_port = metrics_port
        self.log_file = log_file
        self._explicit_model_control = explicit_model_control
        self._drain_timeout_s = drain_timeout_s
        self._otlp_traces_endpoint = otlp_traces_endpoint
        self._environment = dict(environment or {})
        self._shm_prefix = f"deepinfer{os.getpid()}x{secrets.token_hex(4)}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._work_folder: Path | None = None
        self._was_ready = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> None:
        """Returns at once; see `wait_ready`. The server ends when the thread that calls this does.

        One that was stopped or killed may be started again, on the same ports.

        Raises:
            ConfigError: names what is missing on this machine, and the command that installs it.
        """
        assert self._work_folder is None, "the server was started already"
        self._work_folder = Path(tempfile.mkdtemp(prefix="deepinfer-server-"))
        self._frontends_folder.mkdir()
        self._was_ready = False
        try:
            layout = find_server(self._work_folder)
            environment = {
                **os.environ,
                **layout.environment,
                **self._environment,
                DRAIN_FILE_VARIABLE: str(self._work_folder / "drain"),
                DRAIN_TIMEOUT_VARIABLE: str(self._drain_timeout_s),
                FRONTENDS_FOLDER_VARIABLE: str(self._frontends_folder),
                **self._temporary_folder(),
            }
            command = [*_end_with_parent(), str(layout.executable), *layout.options, *self._options()]
            with _open_log(self.log_file) as log:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except BaseException:
            self._remove_files()
            raise

    def wait_ready(self, timeout_s: float) -> None:
        """Until every model serves.

        Raises:
            EngineError: the server ended; the message has the last lines of its log.
            UnavailableError: it is not ready after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            status = self.poll()
            if status is not None:
                what = f"tritonserver ended with status {status} before it was ready"
                reasons = "".join(f"; {reason}" for reason in read_failed_starts(self._frontends_folder))
                raise EngineError(f"{what}{self._log_tail()}{reasons}")
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"tritonserver is not ready after {timeout_s:g} s{self._log_tail()}")
            time.sleep(_POLL_INTERVAL_S)

    def is_ready(self) -> bool:
        """Whether the server and all its models say so; whether they generate is what `deepinfer check` tells."""
        is_ready = self._answers("/v2/health/ready")
        self._was_ready = self._was_ready or is_ready
        return is_ready

    def is_model_ready(self, name: str) -> bool:
        return self._answers(f"/v2/models/{name}/ready")

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, None if it still runs after `timeout_s`."""
        assert self._process is not None, "the server was not started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float | None = None) -> None:
        """Drains and ends the server; kills what is left after `timeout_s`. Safe to call twice.

        The default leaves running requests `drain_timeout_s`, and everything is gone 8 s after that. One that was
        never ready serves nobody and is killed.
        """
        if self._process is None or self._work_folder is None:
            return
        if not self._was_ready:
            self.kill()
            return
        if timeout_s is None:
            timeout_s = self._exit_timeout_s() + 1.0
        # First the sign for the frontends, which Triton itself tells nothing; then the server.
        (self._work_folder / "drain").touch()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            if self.wait(timeout_s) is None:
                logger.error("tritonserver did not end within %g s and is killed", timeout_s)
                self._process.kill()
                self._process.wait()
        self._remove_leftovers()

    def kill(self) -> None:
        """Ends the server at once: every client's connection is closed. Safe to call twice."""
        if self._process is None or self._work_folder is None:
            return
        self._was_ready = False  # a `stop` that interrupts this goes on here
        self._process.kill()
        self._process.wait()
        self._remove_leftovers()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def dead_frontends(self) -> list[DeadFrontend]:
        """Processes of our models that crashed; their clients hang for as long as the server runs."""
        return find_dead_frontends(self._frontends_folder)

    def shared_memory_regions(self) -> list[Path]:
        """The server's own regions that exist now."""
        return sorted(_SHM_FOLDER.glob(f"{self._shm_prefix}*"))

    def process_ids(self) -> list[int]:
        """The server and every process that it started, also indirectly."""
        return _session_members(self.pid)

    def _answers(self, path: str) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://localhost:{self.http_port}{path}", timeout=_HTTP_TIMEOUT_S) as response:
                return bool(response.status == 200) and self.poll() is None
        except OSError:  # refused, reset, too slow, or a status of 400
            return False

    def _options(self) -> list[str]:
        secret = secrets.token_hex(16)
        options = [
            f"--model-repository={self.model_repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={self._exit_timeout_s():.0f}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--http-restricted-api={_RESTRICTED_APIS}:deepinfer={secret}",
            f"--grpc-restricted-protocol={_RESTRICTED_APIS}:deepinfer={secret}",
        ]
        if not Path("/proc/driver/nvidia").exists():
            options.append("--allow-gpu-metrics=false")
        if self._explicit_model_control:
            options += ["--model-control-mode=explicit", "--load-model=*"]
        if self._otlp_traces_endpoint is not None:
            settings = (f"opentelemetry,url={self._otlp_traces_endpoint}", *_TRACE_EVERY_REQUEST)
            options += [f"--trace-config={setting}" for setting in settings]
        return options

    def _exit_timeout_s(self) -> float:
        return math.ceil(self._drain_timeout_s + _CLOSE_TIME_S)

    def _log_tail(self) -> str:
        if self.log_file is None:
            return "; its log is above"
        with self.log_file.open("rb") as log:
            log.seek(max(0, self.log_file.stat().st_size - _MAX_LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not _LOG_NOISE.match(line)]
        return f"; the end of its log ({self.log_file}):\n" + "\n".join(lines[-_NUM_LOG_LINES_SHOWN:])

    @property
    def _frontends_folder(self) -> Path:
        assert self._work_folder is not None, "the server does not run"
        return self._work_folder / "frontends"

    def _temporary_folder(self) -> dict[str, str]:
        """What a killed process leaves in the work folder goes with it."""
        folder = str(self._work_folder)
        return {"TMPDIR": folder} if len(folder) <= _MAX_TMPDIR_LENGTH else {}

    def _remove_leftovers(self) -> None:
        assert self._process is not None
        _kill_session(self._process.pid)
        for region in self.shared_memory_regions():
            region.unlink(missing_ok=True)
        self._remove_files()

    def _remove_files(self) -> None:
        if self._work_folder is not None:
            shutil.rmtree(self._work_folder, ignore_errors=True)
            self._work_folder = None


def _end_with_parent() -> list[str]:
    """A launcher that is killed must not leave its server behind."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


@contextlib.contextmanager
def _open_log(log_file: Path | None) -> Iterator[IO[bytes] | None]:
    if log_file is None:
        yield None
    else:
        with log_file.open("ab") as log:
            yield log


def _session_members(session_id: int) -> list[int]:
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (command) state ppid pgrp session …; the command may hold spaces and parentheses
                fields = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == session_id and fields[0] != "Z":
                    members.append(int(folder.name))
    return members


def _kill_session(session_id: int) -> None:
    """Stubs and engines end by themselves when their server does; this is for those that hang."""
    deadline_s = time.monotonic() + _CLOSE_TIME_S
    while members := _session_members(session_id):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            logger.error("processes that cannot be killed: %s", members)
            return
        time.sleep(_POLL_INTERVAL_S)
