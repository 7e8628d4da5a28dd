"""Two engines behind one model on a real server: shared requests, metrics of both, and the death of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.oracle import TransformersOracle
from tests.support.tiny_text_model import byte_tokenizer, make_tiny_text_model
from tests.support.triton_client import GrpcRequest, stream_error, stream_text
from tests.support.triton_server import engine_process_ids, read_metrics, running_server, wait_until

KNOWN = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
LONG = {**KNOWN, "max_tokens": 1900}
NUM_REQUESTS = 12
SERVE_AGAIN_LIMIT_S = 60.0
INTERMEDIATE_SIZE = 32_768  # steps of some ms: a long request is not over when the last one of them has begun


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    """Prompt → the tokens after it; filled by `server`."""
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, list[int]]) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny_text_model(folder, intermediate_size=INTERMEDIATE_SIZE)
    oracle, tokenizer = TransformersOracle(model), byte_tokenizer()
    for index in range(NUM_REQUESTS):
        prompt = f"{index}: the sea"
        texts[prompt] = oracle.greedy(tokenizer(prompt)["input_ids"], KNOWN["max_tokens"], ignore_eos=True)
    arguments = {"model": str(model), "dtype": "float32", "data_parallel_size": 2, "max_model_len": 2048}
    with running_server(folder, {"deepinfer": arguments}) as server:
        yield server


def test_both_engines_answer_and_both_are_counted(server: TritonServer, texts: dict[str, list[int]]) -> None:
    pids = engine_process_ids(server)
    assert len(pids) == 2
    before = {pid: cpu_time(pid) for pid in pids}
    requests = {
        prompt: GrpcRequest(server, text_input=prompt, stream=True, sampling_parameters=KNOWN) for prompt in texts
    }
    for prompt, request in requests.items():
        responses = request.result()
        stream_text(responses)
        assert [token for response in responses for token in response.token_ids] == texts[prompt]
    assert all(cpu_time(pid) > before[pid] for pid in pids)
    num_tokens = sum(map(len, texts.values()))
    wait_until(lambda: read_metrics(server)["deepinfer_generation_tokens_total"] >= num_tokens, 5, "all are counted")


def test_one_that_is_killed_takes_its_own_requests_with_it(server: TritonServer, texts: dict[str, list[int]]) -> None:
    requests = [GrpcRequest(server, text_input=prompt, stream=True, sampling_parameters=LONG) for prompt in texts]
    for request in requests:
        request.wait_first()
    os.kill(engine_process_ids(server)[0], signal.SIGKILL)
    num_failed = 0
    for request in requests:
        responses = request.result()
        if responses[-1].error is not None:
            assert stream_error(responses).startswith("INTERNAL: ")
            num_failed += 1
        else:
            assert sum(len(response.token_ids) for response in responses) == LONG["max_tokens"]
    assert 0 < num_failed < NUM_REQUESTS
    wait_until(lambda: len(engine_process_ids(server)) == 2, SERVE_AGAIN_LIMIT_S, "there are two again")
    names = ("deepinfer_requests_running", "deepinfer_requests_waiting", "deepinfer_kv_cache_usage_ratio")
    wait_until(lambda: all(read_metrics(server)[name] == 0 for name in names), 5, "idle")
    test_both_engines_answer_and_both_are_counted(server, texts)


def cpu_time(pid: int) -> int:
    """Clock ticks in user mode."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return int(stat.read().rpartition(")")[2].split()[11])
