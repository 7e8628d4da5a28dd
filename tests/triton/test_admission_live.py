"""Admission, deadlines, cancel by id and priority on the real server, as its clients see them."""

from __future__ import annotations

import queue
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import GrpcRequest, http_generate, http_stream, stream_error, stream_text
from tests.support.triton_server import read_metrics, running_server, wait_until

AGING_S = 1.0
MAX_QUEUE_SIZE = 4
REFUSAL_LIMIT_S = 0.1
SLACK_S = 3.0  # of deadlines, on a busy machine
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admission")


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[TritonServer]:
    """One sequence at a time, and four requests that may wait."""
    arguments = {
        "dtype": "float32",
        "max_num_seqs": 1,
        "max_model_len": 2048,
        "max_queue_size": MAX_QUEUE_SIZE,
        "priority_aging_s": AGING_S,
    }
    with running_server(folder, {"deepinfer": arguments}) as server:
        yield server


@contextmanager
def busy(server: TritonServer, **options: Any) -> Iterator[GrpcRequest]:
    """A stream that has the engine's only place."""
    request = GrpcRequest(server, text_input="Once", sampling_parameters=LONG, stream=True, **options)
    try:
        request.wait_first()
        yield request
    finally:
        request.cancel()
        wait_until(lambda: read_metrics(server)["deepinfer_requests_running"] == 0, 30, "the place is free")


def waiting(server: TritonServer) -> float:
    return read_metrics(server)["deepinfer_requests_waiting"]


def short(server: TritonServer, **options: Any) -> GrpcRequest:
    fields = {"max_tokens": 2, "ignore_eos": True, **options.pop("fields", {})}
    return GrpcRequest(server, text_input="Next", sampling_parameters=fields, stream=True, **options)


def test_a_full_queue_is_told_at_once_with_its_numbers_and_those_inside_are_served(narrow: TritonServer) -> None:
    with busy(narrow):
        queued = [short(narrow) for _ in range(MAX_QUEUE_SIZE)]
        wait_until(lambda: waiting(narrow) == MAX_QUEUE_SIZE, 10, "the queue is full")
        took_s = []
        for _ in range(5):
            started_s = time.monotonic()
            status, answer = http_generate(narrow, text_input="One more", max_tokens=2)
            took_s.append(time.monotonic() - started_s)
            assert status in (400, 503)
            assert f"UNAVAILABLE: {MAX_QUEUE_SIZE} requests wait for their first token" in answer["error"]
            assert f"max_queue_size is {MAX_QUEUE_SIZE}" in answer["error"]
        assert "UNAVAILABLE" in stream_error(short(narrow).result())
        assert statistics.median(took_s) < REFUSAL_LIMIT_S, took_s
    for request in queued:
        stream_text(request.result())


def test_a_queue_timeout_ends_what_waits_and_not_what_runs(narrow: TritonServer) -> None:
    with busy(narrow, parameters={"queue_timeout": 100_000}) as running:
        started_s = time.monotonic()
        queued = short(narrow, fields={"queue_timeout": 300_000})
        error = stream_error(queued.result())
        assert 0.3 <= time.monotonic() - started_s < 0.3 + SLACK_S
        assert "CANCELLED: queue_timeout of 0.3 s passed before a step began" in error
        num_responses = len(running.responses)
        wait_until(lambda: len(running.responses) > num_responses, 10, "it goes on")


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_timeout_ends_the_whole_request_and_its_client_keeps_what_was_streamed(
    narrow: TritonServer, is_queued: bool
) -> None:
    """`timeout` as tritonclient's users give it over gRPC, and as a key of the generate endpoint."""
    events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with busy(narrow) if is_queued else nullcontext():
        client = triton_grpc.InferenceServerClient(f"localhost:{narrow.grpc_port}")
        client.start_stream(lambda result, error: events.put((result, error)))
        started_s = time.monotonic()
        inputs = [
            tensor("text_input", "One"),
            tensor("stream", True),
            tensor("sampling_parameters", '{"max_tokens": 1500, "ignore_eos": true}'),
        ]
        client.async_stream_infer("deepinfer", inputs, timeout=2_500_000)
        error, tokens = None, 0
        while error is None:
            result, error = events.get(timeout=30)
            tokens += 0 if result is None else len(result.as_numpy("token_ids"))
        assert 2.5 <= time.monotonic() - started_s < 2.5 + SLACK_S
        assert "CANCELLED: timeout of 2.5 s passed before the answer" in str(error)
        assert (tokens > 0) == (not is_queued)
        client.stop_stream()
        client.close()
        if is_queued:
            status, answer = http_generate(narrow, text_input="One", timeout=2_500_000, **LONG)
            assert status in (400, 503)
        else:
            first, *_, answer = http_stream(narrow, text_input="One", stream=True, timeout=2_500_000, **LONG)
            assert "text_output" in first
        assert "CANCELLED: timeout of 2.5 s passed before the answer" in answer["error"]


def tensor(name: str, value: str | bool) -> Any:
    made = triton_grpc.InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES")
    made.set_data_from_numpy(np.array([value], dtype=bool if isinstance(value, bool) else object))
    return made


def test_cancel_by_id_over_http_and_grpc_ends_running_and_queued_at_once(narrow: TritonServer) -> None:
    for cancel in (cancel_over_http, cancel_over_grpc):
        with busy(narrow, request_id="mine") as running:
            queued = [short(narrow, request_id="mine"), short(narrow, request_id="other")]
            wait_until(lambda: waiting(narrow) == 2, 10, "both wait")
            started_s = time.monotonic()
            assert cancel(narrow, "mine") is None
            for request in (running, queued[0]):
                assert "CANCELLED: cancelled by the request's id" in stream_error(request.result())
            assert max(request.end_s or 0.0 for request in (running, queued[0])) - started_s < 0.2 + SLACK_S
            stream_text(queued[1].result())
        error = cancel(narrow, "mine")
        assert error is not None
        assert "INVALID_ARG: no request with the id 'mine' is running" in error


def cancel_over_http(server: TritonServer, request_id: str) -> str | None:
    status, answer = http_generate(server, cancel_request_id=request_id)
    if status == 200:
        assert answer == {"model_name": "deepinfer", "model_version": "1"}
        return None
    return str(answer["error"])


def cancel_over_grpc(server: TritonServer, request_id: str) -> str | None:
    events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton_grpc.InferenceServerClient(f"localhost:{server.grpc_port}")
    client.start_stream(lambda result, error: events.put((result, error)))
    client.async_stream_infer("deepinfer", [tensor("cancel_request_id", request_id)], request_id="canceller")
    result, error = events.get(timeout=10)
    client.stop_stream()
    client.close()
    if error is not None:
        return str(error)
    assert result.get_response().id == "canceller"
    assert len(result.get_response().outputs) == 0
    return None


def test_an_urgent_request_overtakes_and_an_old_one_is_not_starved(narrow: TritonServer) -> None:
    """One place, one level of priority a second of waiting: who came long ago goes before who is urgent and new.

    Over gRPC the priority is in sampling_parameters, over HTTP it is a key beside text_input.
    """
    order: list[str] = []

    def serve(name: str, priority: int) -> None:
        stream_text(short(narrow, fields={"priority": priority}).result())
        order.append(name)

    def serve_over_http(name: str, priority: int) -> None:
        status, _ = http_generate(narrow, text_input="Next", max_tokens=2, priority=priority)
        assert status == 200
        order.append(name)

    with ThreadPoolExecutor(4) as pool, busy(narrow, parameters={"timeout": 60_000_000}):
        pool.submit(serve, "old", 1)
        wait_until(lambda: waiting(narrow) == 1, 10, "old waits")
        time.sleep(2.5 * AGING_S)  # worth more than the one level between old and new
        pool.submit(serve, "new", 0)
        wait_until(lambda: waiting(narrow) == 2, 10, "new waits")
        pool.submit(serve_over_http, "urgent", -5)
        wait_until(lambda: waiting(narrow) == 3, 10, "urgent waits")
    assert order == ["urgent", "old", "new"]


def test_each_request_is_in_the_log_by_its_id_and_without_its_text(narrow: TritonServer, folder: Path) -> None:
    def line_about(client_id: str) -> str:
        log = folder / "tritonserver.log"
        found: list[str] = []

        def look() -> bool:
            found[:] = re.findall(rf".*request {client_id}#deepinfer\.\d+: .*", log.read_text(errors="replace"))
            return bool(found)

        wait_until(look, 5, f"a line about {client_id}")
        assert len(found) == 1
        return found[0]

    stream_text(GrpcRequest(narrow, request_id="log-good", text_input="Secret words", stream=True).result())
    bad: dict[str, Any] = {"text_input": "Secret words", "id": "log-bad", "max_tokens": 0}
    assert http_generate(narrow, **bad)[0] == 400
    assert " INFO " in line_about("log-good")
    assert re.search(r"(length|stop); \d+ prompt tokens", line_about("log-good"))
    assert "INVALID_ARG: max_tokens: must be at least 1; 0 prompt tokens" in line_about("log-bad")
    assert "Secret" not in (folder / "tritonserver.log").read_text(errors="replace")
