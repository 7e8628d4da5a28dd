"""A real tritonserver for tests, on free ports, with a log of its own."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from deepinfer_backend.triton.model_config import write_model_repository
from deepinfer_backend.triton.server import TritonServer
from tests.support.processes import command_line

START_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.02


@contextmanager
def running_server(
    folder: Path,
    models: Mapping[str, Mapping[str, Any]],
    *,
    config_pbtxt: str | None = None,
    model_py: str | None = None,
    **options: Any,
) -> Iterator[TritonServer]:
    """A ready server with these models (name → engine arguments); `folder` gets its repository and its log.

    config_pbtxt, model_py: instead of what the launcher writes, for each model.
    """
    repository = folder / "models"
    write_model_repository(repository, models)
    for name in models:
        if config_pbtxt is not None:
            (repository / name / "config.pbtxt").write_text(config_pbtxt, encoding="utf-8")
        if model_py is not None:
            (repository / name / "1" / "model.py").write_text(model_py, encoding="utf-8")
    http_port, grpc_port, metrics_port = free_ports(3)
    server = TritonServer(
        repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=folder / "tritonserver.log",
        **options,
    )
    with server:
        server.wait_ready(START_TIMEOUT_S)
        # tritonserver opens this door last, when it has said that it is ready.
        wait_until(lambda: _listens(metrics_port), START_TIMEOUT_S, "the metrics' port")
        yield server


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held; fails after `timeout_s`."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(POLL_INTERVAL_S)
    return time.monotonic() - start_s


def read_metrics(server: TritonServer, model: str = "deepinfer") -> dict[str, float]:
    """Metric name → value, of `model`; a histogram's buckets are left out. 0 until it is there."""
    with urllib.request.urlopen(f"http://localhost:{server.metrics_port}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    values: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        name, brace, rest = line.partition("{")
        if brace and f'model="{model}"' in rest and not name.endswith("_bucket"):
            values[name] = float(rest.rpartition("}")[2])
    return values


def engine_process_ids(server: TritonServer) -> list[int]:
    """The engines that run behind `server`."""
    return [pid for pid in server.process_ids() if b"deepinfer_backend.engine" in command_line(pid)]


def running_processes(process_ids: list[int]) -> list[int]:
    """Those that have not ended; one that only waits for its parent to ask how has."""
    return [pid for pid in process_ids if _state(pid) not in (None, "Z", "X")]


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
