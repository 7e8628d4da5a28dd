"""SIGKILL of any engine process at any moment, in every layout of ranks: one end for every request, then all is back.

Three kills a layout; DEEPINFER_NUM_KILLS sets more.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.triton.server import TritonServer
from tests.support.known_answer import LONG, expected_answer, is_idle, known_answer, start_long_streams
from tests.support.processes import command_line
from tests.support.tiny_text_model import make_tiny_text_model
from tests.support.triton_client import Response, stream_error
from tests.support.triton_server import running_server, wait_until

NUM_KILLS = int(os.environ.get("DEEPINFER_NUM_KILLS", "3"))
NUM_STREAMS = 8
LATEST_KILL_S = 1.5  # after the requests were sent
SERVES_AGAIN_LIMIT_S = 60.0

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two engines": ("llama", {"data_parallel_size": 2}),
    "two in lockstep": ("llama", {"data_parallel_size": 2, "data_parallel_lockstep": True}),
    "two share experts": ("mixtral", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "two ranks of one": ("llama", {"tensor_parallel_size": 2}),
    "one prefills, two decode": ("llama", {"data_parallel_size": 3, "num_prompt_engines": 1}),
}
"""Family of the model, and engine arguments."""


@dataclass(frozen=True)
class Served:
    server: TritonServer
    num_processes: int
    known: list[int]


@pytest.fixture(params=LAYOUTS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    family, layout = LAYOUTS[request.param]
    model = make_tiny_text_model(tmp_path, family)
    known = expected_answer(model)
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 2**27,
        "max_engine_restarts": 1000,
        **layout,
    }
    with running_server(tmp_path, {"deepinfer": arguments}) as server:
        yield Served(server, EngineConfig(**arguments).num_processes, known)


@pytest.mark.timeout(60 + 90 * NUM_KILLS)
def test_every_request_has_one_end_and_all_are_back(served: Served) -> None:
    server = served.server
    chance = random.Random(7)
    for _ in range(NUM_KILLS):
        wait_until(
            lambda: len(rank_process_ids(server)) == served.num_processes, SERVES_AGAIN_LIMIT_S, "all ranks are there"
        )
        wait_until(lambda: known_answer(server) == served.known, SERVES_AGAIN_LIMIT_S, "it serves")
        requests = start_long_streams(server, NUM_STREAMS)
        time.sleep(chance.uniform(0, LATEST_KILL_S))
        os.kill(chance.choice(rank_process_ids(server)), signal.SIGKILL)
        for request in requests:
            check_end(request.result())
    wait_until(lambda: known_answer(server) == served.known, SERVES_AGAIN_LIMIT_S, "it serves")
    wait_until(lambda: is_idle(server), 5, "nothing is left")


def rank_process_ids(server: TritonServer) -> list[int]:
    """Of engines and of their further ranks."""
    names = (b"deepinfer_backend.engine", b"deepinfer_backend.worker")
    return [pid for pid in server.process_ids() if any(name in command_line(pid) for name in names)]


def check_end(responses: list[Response]) -> None:
    """All of it, or an error: once and last."""
    if responses[-1].error is not None:
        assert stream_error(responses).startswith(("INTERNAL: ", "UNAVAILABLE: "))
    else:
        assert sum(len(response.token_ids) for response in responses) == LONG["max_tokens"]
        assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
