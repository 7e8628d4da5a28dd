"""SIGTERM, unload and load, and the death of the engine: everybody is answered, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.triton.server import TritonServer
from deepinfer_backend.triton.shutdown_signal import DEFAULT_DRAIN_TIMEOUT_S
from tests.support.triton_client import (
    GrpcRequest,
    Response,
    http_generate,
    http_post,
    http_stream,
    stream_error,
    stream_text,
)
from tests.support.triton_server import engine_process_ids, read_metrics, running_processes, running_server, wait_until

ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 32, "max_model_len": 2048}
ENDLESS = {"max_tokens": 1_900, "ignore_eos": True}
EXIT_LIMIT_S = 15.0
ANSWER_LIMIT_S = 2.0
SERVE_AGAIN_LIMIT_S = 15.0


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose model may be unloaded and loaded."""
    folder = tmp_path_factory.mktemp("explicit")
    with running_server(folder, {"deepinfer": ARGUMENTS}, explicit_model_control=True) as server:
        yield server


def start_streams(server: TritonServer, count: int) -> list[GrpcRequest]:
    """`count` long streams that all run."""
    requests = [
        GrpcRequest(server, text_input=f"Number {n}:", sampling_parameters=ENDLESS, stream=True) for n in range(count)
    ]
    for request in requests:
        request.wait_first()
    return requests


def test_sigkill_of_the_engine_answers_8_streams_and_serves_again(explicit: TritonServer) -> None:
    requests = start_streams(explicit, 8)
    [engine] = engine_process_ids(explicit)
    os.kill(engine, signal.SIGKILL)
    killed_s = time.monotonic()
    for request in requests:
        assert stream_error(request.result()).startswith("INTERNAL: ")
        assert request.end_s is not None and request.end_s - killed_s < ANSWER_LIMIT_S
    status, answer = http_generate(explicit, text_input="x", max_tokens=1)
    assert (status, answer["error"][:13]) == (400, "UNAVAILABLE: ")
    wait_until(
        lambda: http_generate(explicit, text_input="x", max_tokens=1)[0] == 200,
        SERVE_AGAIN_LIMIT_S - (time.monotonic() - killed_s),
        "serving again",
    )
    assert engine_process_ids(explicit) != [engine]


def test_unload_and_load_ten_times_under_traffic(explicit: TritonServer) -> None:
    """Each request of the traffic either gets its whole answer or an error; none hangs, and none goes missing."""
    stop, loaded = threading.Event(), threading.Event()
    outcomes: list[list[Response]] = []

    def keep_asking() -> None:
        while loaded.wait(180) and not stop.is_set():
            request = GrpcRequest(explicit, text_input="Go on:", sampling_parameters={"max_tokens": 4}, stream=True)
            outcomes.append(request.result(timeout_s=60))

    clients = [threading.Thread(target=keep_asking, daemon=True) for _ in range(4)]
    for client in clients:
        client.start()
    for _ in range(10):
        loaded.set()
        wanted = len(outcomes) + len(clients)
        wait_until(lambda wanted=wanted: len(outcomes) >= wanted, 30, "traffic")  # type: ignore[misc]
        assert http_post(explicit, "/v2/repository/models/deepinfer/unload", b"{}")[0] == 200
        loaded.clear()
        wait_until(lambda: not engine_process_ids(explicit), 30, "the engine is gone")
        assert http_post(explicit, "/v2/repository/models/deepinfer/load", b"{}", timeout_s=120)[0] == 200
        assert http_generate(explicit, text_input="x", max_tokens=1)[0] == 200
    stop.set()
    loaded.set()
    for client in clients:
        client.join(60)
        assert not client.is_alive()
    for responses in outcomes:
        if responses[-1].error is None:
            stream_text(responses)
        else:
            stream_error(responses)
    assert len(engine_process_ids(explicit)) == 1


def test_an_unload_gives_running_requests_the_drain_time(tmp_path: Path) -> None:
    drain_timeout_s, noticed_s = 4.0, 1.5
    with running_server(
        tmp_path, {"deepinfer": ARGUMENTS}, explicit_model_control=True, drain_timeout_s=drain_timeout_s
    ) as server:
        long = start_streams(server, 2)
        over_http = HttpStream(server)
        short = GrpcRequest(server, text_input="Go on:", sampling_parameters={"max_tokens": 4}, stream=True)
        short.wait_first()
        unloaded_s = time.monotonic()
        assert http_post(server, "/v2/repository/models/deepinfer/unload", b"{}")[0] == 200
        assert http_generate(server, text_input="x", max_tokens=1)[0] == 404
        stream_text(short.result())
        for request in long:
            assert stream_error(request.result()) == "UNAVAILABLE: the model is being unloaded"
            assert request.end_s is not None
            assert drain_timeout_s < request.end_s - unloaded_s < drain_timeout_s + noticed_s + ANSWER_LIMIT_S
        assert over_http.result()[-1]["error"] == "UNAVAILABLE: the model is being unloaded"
        wait_until(lambda: not engine_process_ids(server), 15, "the engine is gone")
        assert http_post(server, "/v2/repository/models/deepinfer/load", b"{}", timeout_s=120)[0] == 200
        assert http_generate(server, text_input="x", max_tokens=1)[0] == 200
        assert server.dead_frontends() == [], "the process of an unloaded model has ended, and that is right"


def test_an_engine_that_dies_too_often_unloads_its_model(tmp_path: Path) -> None:
    models = {"deepinfer": {**ARGUMENTS, "max_engine_restarts": 0}}
    with running_server(tmp_path, models, explicit_model_control=True) as server:
        os.kill(engine_process_ids(server)[0], signal.SIGKILL)
        wait_until(lambda: not server.is_model_ready("deepinfer"), 10, "the model is not ready")


def tell_to_stop(server: TritonServer, told_by: str) -> None:
    """Returns when the server has ended."""
    if told_by == "launcher":
        server.stop()
    else:
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(EXIT_LIMIT_S) is not None


@pytest.mark.parametrize(
    ("told_by", "num_http_streams", "drain_timeout_s"),
    [("launcher", 4, DEFAULT_DRAIN_TIMEOUT_S), ("bare signal", 0, 1.0), ("bare signal", 4, 1.0)],
)
def test_sigterm_with_32_streams(tmp_path: Path, told_by: str, num_http_streams: int, drain_timeout_s: float) -> None:
    """A bare signal is what a server gets that was not started by our launcher."""
    with running_server(tmp_path, {"deepinfer": ARGUMENTS}, drain_timeout_s=drain_timeout_s) as server:
        requests = start_streams(server, 32 - num_http_streams)
        http_clients = [HttpStream(server) for _ in range(num_http_streams)]
        wait_until(lambda: read_metrics(server)["deepinfer_requests_running"] == 32, 60, "all run")
        process_ids = server.process_ids()
        assert len(process_ids) >= 3 and server.shared_memory_regions()
        started_s = time.monotonic()
        tell_to_stop(server, told_by)
        assert time.monotonic() - started_s < EXIT_LIMIT_S
        assert server.poll() == 0
        for request in requests:
            error = stream_error(request.result(timeout_s=5))
            assert request.rpc_error is None and error.startswith("UNAVAILABLE: ")
        for client in http_clients:
            assert client.result()[-1]["error"].startswith("UNAVAILABLE: ")
        wait_until(lambda: not running_processes(process_ids), 2, "no process is left")
        assert server.shared_memory_regions() == []


class HttpStream(threading.Thread):
    """One endless stream over HTTP."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__(name="http-stream", daemon=True)
        self._server = server
        self._events: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        self._events = http_stream(self._server, text_input="Number:", stream=True, **ENDLESS)

    def result(self) -> list[dict[str, Any]]:
        """Its events, once it has ended."""
        self.join(5)
        assert not self.is_alive()
        return self._events


def test_a_killed_server_leaves_no_process_and_once_stopped_no_memory(tmp_path: Path) -> None:
    with running_server(tmp_path, {"deepinfer": ARGUMENTS}) as server:
        start_streams(server, 2)
        process_ids = server.process_ids()
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not running_processes(process_ids), 20, "stub and engine end by themselves")
        server.stop()
        assert server.shared_memory_regions() == []
