"""Our engine behind a real tritonserver."""

from __future__ import annotations

import importlib.metadata
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines.grpc_streams import run_streams
from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, Work
from tests.support.triton_server import running_server

_MODEL = "deepinfer"


class TritonRunner:
    """Owns the server."""

    version = importlib.metadata.version("deepinfer-backend")

    def __init__(self, num_threads: int, **engine_args: Any) -> None:
        # num_threads: the engine's process takes it from OMP_NUM_THREADS.
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(running_server(folder, {_MODEL: engine_args}))
            self._url = f"localhost:{server.grpc_port}"
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def run(self, work: Work) -> Figures:
        prompts = [{"input_ids": prompt} for prompt in work.prompts]
        return run_streams(self._url, _MODEL, work, prompts, lambda response: len(response.token_ids))


if __name__ == "__main__":
    serve(TritonRunner)
