"""An engine as the benchmark sees it: what it is called, what it lacks to run here, and its process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.workload import Figures, Work

Weights = Literal["f32", "bf16", "8-bit", "4-bit"]

DTYPES: Mapping[Weights, str] = {"f32": "float32", "bf16": "bfloat16"}
"""What those that are floats are called elsewhere."""

_ROOT = Path(__file__).parents[2]
_CLOSE_TIMEOUT_S = 20.0
_NUM_LOG_LINES = 12


class EngineFailedError(Exception):
    """The engine's process ended, hung or answered with an error."""


@dataclass(frozen=True)
class Engine:
    """One way to run the model.

    family: whose engine it is. worker: the module that runs in its process, with `python`.
    arguments: called once all that it needs is there. missing: what to do before it can run, or None.
    kv_bytes: of one number in its KV cache.
    """

    family: str
    weights: Weights
    worker: str
    kv_bytes: int
    arguments: Callable[[], Mapping[str, Any]]
    missing: Callable[[], str | None]
    python: Callable[[], Path]
    environment: Callable[[int], Mapping[str, str]] = field(default=lambda num_threads: {})

    @property
    def name(self) -> str:
        return f"{self.family} {self.weights}"


class EngineProcess:
    """Owns the process of one engine. start, then run as often as wanted, then close; one thread.

    Everything that the engine starts is in its process group, and ends with it. Between runs the group is stopped: some
    engines look for work all the time, and one at a time is to compute.
    """

    def __init__(self, engine: Engine, num_threads: int, log_file: Path, timeout_s: float = 1800.0) -> None:
        self.engine = engine
        self.version = ""
        self._num_threads = num_threads
        self._log_file = log_file
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the model is loaded.

        Raises:
            EngineFailedError
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._num_threads),
            "PYTHONPATH": str(_ROOT),
            "HF_HUB_OFFLINE": "1",
            **self.engine.environment(self._num_threads),
        }
        arguments = {**self.engine.arguments(), "num_threads": self._num_threads}
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [self.engine.python(), "-m", self.engine.worker, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env=environment,
                start_new_session=True,
            )
        self.version = self._answer()["version"]

    def run(self, work: Work) -> Figures:
        """Raises EngineFailedError, after which the process may only be closed."""
        assert self._process is not None and self._process.stdin is not None
        _signal_group(self._process, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(asdict(work)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailedError(f"its process ended: {self._end_of_log()}") from None
        return Figures(**self._answer())

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        _signal_group(process, signal.SIGCONT)
        try:
            process.stdin.close()
            process.wait(_CLOSE_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
            process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        deadline_s = time.monotonic() + self.timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise EngineFailedError(f"no answer within {self.timeout_s:.0f} s: {self._end_of_log()}")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise EngineFailedError(f"its process ended: {self._end_of_log()}")
            line += part
        _signal_group(self._process, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailedError(f"{answer['error']} (more in {self._log_file})")
        return answer

    def _end_of_log(self) -> str:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join([str(self._log_file), *lines[-_NUM_LOG_LINES:]])


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, number)
