"""The protocol between the benchmark and an engine's process, and what is said when it is not kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.engine import Engine, EngineFailedError, EngineProcess
from benchmarks.workload import Work
from tests.support.triton_server import wait_until

WORK = Work([[7, 1], [9, 1]], concurrency=2, max_tokens=4)


def fake_engine(family: str = "fake", missing: str | None = None, **arguments: Any) -> Engine:
    return Engine(
        family,
        "bf16",
        "tests.support.peer",
        kv_bytes=2,
        arguments=lambda: arguments,
        missing=lambda: missing,
        python=lambda: Path(sys.executable),
    )


@contextmanager
def running(tmp_path: Path, timeout_s: float = 60.0, **arguments: Any) -> Iterator[EngineProcess]:
    process = EngineProcess(fake_engine(**arguments), num_threads=2, log_file=tmp_path / "log", timeout_s=timeout_s)
    try:
        process.start()
        yield process
    finally:
        process.close()


def test_a_process_runs_again_and_again(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.25) as process:
        assert process.version.startswith("1.0 on 2, ")
        for _ in range(2):
            figures = process.run(WORK)
            assert (figures.num_output_tokens, figures.elapsed_s, figures.step_s) == (8, 1.0, 0.25)
            assert figures.first_token_s == [7.0, 9.0]
    assert "libraries print what they like" in (tmp_path / "log").read_text()


def test_an_engine_that_waits_takes_no_time_from_the_others(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        stat = Path(f"/proc/{process.version.split()[-1]}/stat")
        for _ in range(2):
            wait_until(lambda: stat.read_text().split()[2] == "T", 10, "the process is stopped")
            process.run(WORK)


@pytest.mark.parametrize(
    ("fault", "message"), [("run", "RuntimeError: too long"), ("death", "its process ended"), ("silence", "no answer")]
)
def test_a_run_that_fails_says_why(tmp_path: Path, fault: str, message: str) -> None:
    with running(tmp_path, fault=fault) as process:
        process.timeout_s = 1.0
        with pytest.raises(EngineFailedError, match=message):
            process.run(WORK)


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match="ValueError: no such model"), running(tmp_path, fault="load"):
        pass
