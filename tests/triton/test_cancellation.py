"""Cancellation on the live server, seen from outside: who waited gets the place, and the queue gets shorter."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import GrpcRequest, http_generate, stream_error, stream_text
from tests.support.triton_server import read_metrics, running_server, wait_until

CANCEL_LIMIT_S = 0.1
# Metrics follow every 0.25 s; one step and one first token of a small model on a busy machine.
SLACK_S = 1.0
LONG = {"max_tokens": 900, "ignore_eos": True}
NUM_CACHE_TOKENS = 64 * 16


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two sequences at a time and a cache that holds 1,024 tokens."""
    arguments = {
        "dtype": "float32",
        "max_num_seqs": 2,
        "block_size": 16,
        "num_gpu_blocks_override": NUM_CACHE_TOKENS // 16,
        "max_model_len": 2048,
    }
    # The shortest config.pbtxt that may be: the rest is filled in.
    folder = tmp_path_factory.mktemp("narrow")
    with running_server(folder, {"deepinfer": arguments}, config_pbtxt='backend: "python"\n') as server:
        yield server


@pytest.fixture
def running(narrow: TritonServer) -> Iterator[list[GrpcRequest]]:
    """Two streams that fill the engine: whatever comes beside them waits."""
    requests = [
        GrpcRequest(narrow, text_input=f"Number {n}:", sampling_parameters={**LONG, "max_tokens": 400}, stream=True)
        for n in range(2)
    ]
    for request in requests:
        request.wait_first()
    yield requests
    for request in requests:
        request.cancel()


def test_a_cancelled_stream_makes_room_at_once(narrow: TritonServer, running: list[GrpcRequest]) -> None:
    queued = GrpcRequest(narrow, text_input="Next:", sampling_parameters={"max_tokens": 2}, stream=True)
    wait_until(lambda: read_metrics(narrow)["deepinfer_requests_waiting"] == 1, 10, "one waits")
    started_s = time.monotonic()
    running[0].cancel()
    queued.wait_first()
    assert time.monotonic() - started_s < CANCEL_LIMIT_S + SLACK_S
    stream_text(queued.result())


def test_a_request_is_cancelled_while_it_waits(narrow: TritonServer, running: list[GrpcRequest]) -> None:
    queued = GrpcRequest(narrow, text_input="Next:", sampling_parameters=LONG, stream=True)
    wait_until(lambda: read_metrics(narrow)["deepinfer_requests_waiting"] == 1, 10, "one waits")
    queued.cancel()
    took_s = wait_until(lambda: read_metrics(narrow)["deepinfer_requests_waiting"] == 0, 10, "none waits")
    assert took_s < CANCEL_LIMIT_S + SLACK_S
    assert all(request.end_s is None for request in running), "the streams beside it go on"


def test_a_deadline_passes_while_it_waits(narrow: TritonServer, running: list[GrpcRequest]) -> None:
    started_s = time.monotonic()
    status, answer = http_generate(narrow, text_input="Next:", max_tokens=5, timeout=300_000)
    assert (status, answer["error"]) == (400, "CANCELLED: timeout of 0.3 s passed before the answer")
    assert 0.3 <= time.monotonic() - started_s < 0.3 + CANCEL_LIMIT_S + SLACK_S
    assert all(request.end_s is None for request in running)


def test_a_closed_connection_is_a_cancellation(narrow: TritonServer, running: list[GrpcRequest]) -> None:
    running[0].close()
    wait_until(lambda: read_metrics(narrow)["deepinfer_requests_running"] == 1, 10, "one runs")
    assert running[1].end_s is None


def test_a_prompt_that_can_never_fit_the_cache(narrow: TritonServer) -> None:
    error = stream_error(GrpcRequest(narrow, input_ids=[1] * (NUM_CACHE_TOKENS + 1)).result())
    assert error.startswith("INVALID_ARG: ")
    assert f"{NUM_CACHE_TOKENS + 1} tokens" in error
