"""Faults put into a running server's engine and frontend: who is told, who is not, and when it serves again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.errors import DeepInferError
from deepinfer_backend.probe import generate_one_token
from deepinfer_backend.triton.model_config import write_model_repository
from deepinfer_backend.triton.server import TritonServer
from tests.support.fault_injection import HANG
from tests.support.faults import Faults
from tests.support.long_text_model import make_long_text_model
from tests.support.triton_client import GrpcRequest, http_generate, http_post, stream_error, stream_text
from tests.support.triton_server import engine_process_ids, read_metrics, running_server, wait_until

FORWARD = "deepinfer_backend.worker.model_runner:ModelRunner.forward"
SAMPLE = "deepinfer_backend.worker.worker:sample_batch"
PLAN = "deepinfer_backend.engine.tracked_requests:TrackedRequests.plan"
AFTER_STEP = "deepinfer_backend.engine.tracked_requests:TrackedRequests.after_step"
STEP_RESULT = "deepinfer_backend.worker.worker:StepState.wait"
ADD_REQUEST = "deepinfer_backend.engine.llm_engine:LLMEngine.add_request"
POST_PROCESS = "deepinfer_backend.engine.llm_engine:LLMEngine.post_process"
KV_CACHE = "deepinfer_backend.worker.kv_cache:KVCache.__init__"
TO_TEXT = "deepinfer_backend.engine.output_processor:OutputProcessor.process"
TO_TEXT_ADD = "deepinfer_backend.engine.output_processor:OutputProcessor.add_request"
SEND = "deepinfer_backend.triton.response_stream:ResponseStream.send_delta"
SUMMARY = "deepinfer_backend.triton.response_stream:ResponseStream.summary"
TOKENIZE = "deepinfer_backend.engine.input_processor:InputProcessor.process"
OBSERVER = "deepinfer_backend.triton.request_log:RequestLog.log_end"
WATCH = "deepinfer_backend.triton.watcher:Watcher._look_at_streams"
PUBLISH = "deepinfer_backend.triton.metrics:ModelMetrics.publish"
TARGETS = [value for name, value in list(globals().items()) if name.isupper() and ":" in str(value)]

MAX_NUM_SEQS = 6
STEP_TIMEOUT_S = 3.0
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": MAX_NUM_SEQS,
    "kv_cache_memory_bytes": 200_000_000,
    "step_timeout_s": STEP_TIMEOUT_S,
    "max_engine_restarts": 100,
}
ENDLESS: dict[str, Any] = {"max_tokens": 60_000, "ignore_eos": True, "temperature": 0}
SHORT: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
ANSWER_LIMIT_S = 2.0
NOTICED_S = 3.0  # over the time that the watchdog gives: its look, and SIGABRT before SIGKILL
SERVE_AGAIN_LIMIT_S = 60.0  # most of it is the import of torch, on a machine with other work
IDLE_LIMIT_S = 5.0


class Bench:
    """A server, its faults, and what one short prompt gives while nothing is wrong."""

    def __init__(self, server: TritonServer, faults: Faults, folder: Path, model: Path) -> None:
        self.server = server
        self.faults = faults
        self.folder = folder
        self.model = model
        self.url = f"localhost:{server.http_port}"
        self._requests: list[GrpcRequest] = []
        self.expected = self.short("first").result()

    def reset(self) -> None:
        """What a test that failed has left would fail the next."""
        self.faults.disarm()
        for request in self._requests:
            request.cancel()
        self._requests.clear()

    def _send(self, **request: Any) -> GrpcRequest:
        self._requests.append(GrpcRequest(self.server, **request))
        return self._requests[-1]

    def short(self, request_id: str, **sampling: Any) -> GrpcRequest:
        sampling = {**SHORT, **sampling}
        return self._send(request_id=request_id, text_input="The sea", stream=True, sampling_parameters=sampling)

    def endless(self, count: int, *, stream: bool = False, **sampling: Any) -> list[GrpcRequest]:
        sampling = {**ENDLESS, **sampling}
        return [
            self._send(request_id=f"long {n}", text_input=f"{n}:", stream=stream, sampling_parameters=sampling)
            for n in range(count)
        ]

    def metric(self, name: str) -> float:
        return read_metrics(self.server)[f"deepinfer_{name}"]

    def wait_running(self, count: int, num_waiting: int = 0) -> None:
        wait_until(
            lambda: (self.metric("requests_running"), self.metric("requests_waiting")) == (count, num_waiting),
            30,
            f"{count} run and {num_waiting} wait",
        )

    def wait_idle(self) -> float:
        """Nothing runs or waits, and every block is free."""
        names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        return wait_until(lambda: all(self.metric(name) == 0 for name in names), IDLE_LIMIT_S, "idle")

    def check_serves(self) -> None:
        assert stream_text(self.short("afterwards").result()) == stream_text(self.expected)

    def engine(self) -> int:
        """The process of the default model."""
        (pid,) = engine_process_ids(self.server)
        return pid

    def log(self) -> str:
        return (self.folder / "tritonserver.log").read_text(errors="replace")

    def generates(self, timeout_s: float = 2.0) -> bool:
        """What `deepinfer check` says."""
        try:
            generate_one_token(self.url, "deepinfer", timeout_s)
        except DeepInferError:
            return False
        return True

    def wait_serving_again(self, since_s: float, what: str) -> None:
        wait_until(self.generates, SERVE_AGAIN_LIMIT_S, "serving again")
        print(f"{what}: serving again after {time.monotonic() - since_s:.1f} s")
        self.check_serves()
        self.wait_idle()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    model = make_long_text_model(folder)
    faults = Faults(folder, TARGETS)
    models = {"deepinfer": {**ARGUMENTS, "model": str(model)}}
    with running_server(
        folder, models, model_py=faults.model_py, explicit_model_control=True, environment=faults.environment
    ) as server:
        yield Bench(server, faults, folder, model)


@pytest.fixture(autouse=True)
def _no_fault_is_left(bench: Bench) -> Iterator[None]:
    yield
    bench.reset()


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (FORWARD, "RuntimeError"),
        (FORWARD, "MemoryError"),
        (FORWARD, "torch.OutOfMemoryError"),
        (SAMPLE, "RuntimeError"),
        (PLAN, "KeyError"),
        (STEP_RESULT, "RuntimeError"),
    ],
)
def test_a_fault_in_a_step_fails_its_requests_and_the_same_engine_serves_the_next(
    bench: Bench, target: str, error: str
) -> None:
    engine = bench.engine()
    running = bench.endless(MAX_NUM_SEQS, logprobs=1)
    bench.wait_running(MAX_NUM_SEQS)
    queued = [bench.short(f"queued {n}") for n in range(2)]
    bench.wait_running(MAX_NUM_SEQS, num_waiting=2)
    log_before = len(bench.log())
    bench.faults.arm(target, error)
    armed_s = time.monotonic()
    for number, request in enumerate(running):
        told = stream_error(request.result())
        assert told.startswith(f"INTERNAL: request long {number}#deepinfer."), told
        assert request.end_s is not None and request.end_s - armed_s < ANSWER_LIMIT_S
    ends_s = [request.end_s - armed_s for request in running if request.end_s is not None]
    for request in queued:
        assert stream_text(request.result()) == stream_text(bench.expected)
    idle_s = bench.wait_idle()
    print(f"{error} in {target}: {MAX_NUM_SEQS} told within {max(ends_s) * 1e3:.0f} ms, idle {idle_s:.2f} s later")
    bench.check_serves()
    assert bench.engine() == engine
    log = bench.log()[log_before:]
    assert "Traceback" in log and "injected" in log
    assert all(f"long {number}#deepinfer." in log for number in range(MAX_NUM_SEQS))


def test_a_fault_in_what_some_requests_ask_for_leaves_the_others_of_the_step_alone(bench: Bench) -> None:
    engine = bench.engine()
    plain = bench.endless(3, stream=True)
    tracked = bench.endless(3, logprobs=1)
    bench.wait_running(6)
    bench.faults.arm(AFTER_STEP, "RuntimeError")
    for request in tracked:
        assert stream_error(request.result()).startswith("INTERNAL: request long ")
    check_goes_on(plain)
    cancel(bench, plain)
    bench.check_serves()
    assert bench.engine() == engine


def test_a_request_that_the_engine_cannot_take_in_fails_alone(bench: Bench) -> None:
    engine = bench.engine()
    others = bench.endless(2, stream=True)
    wait_for_first(others)
    bench.faults.arm(ADD_REQUEST, "KeyError")
    assert stream_error(bench.short("refused").result()).startswith("INTERNAL: request refused#deepinfer.")
    check_goes_on(others)
    cancel(bench, others)
    bench.check_serves()
    assert bench.engine() == engine


@pytest.mark.parametrize("target", [TO_TEXT, TO_TEXT_ADD, SEND, TOKENIZE])
def test_a_fault_while_one_request_is_answered_ends_that_request_alone(bench: Bench, target: str) -> None:
    """The frontend's faults: those of the responder's thread and of the input's."""
    engine = bench.engine()
    streams = bench.endless(4, stream=True)
    wait_for_first(streams)
    bench.faults.arm(target, "RuntimeError")
    armed_s = time.monotonic()
    if target in (TO_TEXT_ADD, TOKENIZE):
        streams.append(bench.short("new"))
    wait_until(lambda: any(stream.end_s is not None for stream in streams), 10, "one has ended")
    (ended,) = [stream for stream in streams if stream.end_s is not None]
    assert ended.end_s is not None
    print(f"RuntimeError in {target}: told after {(ended.end_s - armed_s) * 1e3:.0f} ms")
    assert stream_error(ended.result()).startswith("INTERNAL: request ")
    streams.remove(ended)
    assert len(streams) == 4 - (target in (TO_TEXT, SEND))
    check_goes_on(streams)
    cancel(bench, streams)
    bench.check_serves()
    assert bench.engine() == engine


@pytest.mark.parametrize("target", [SUMMARY, OBSERVER, WATCH, PUBLISH])
def test_a_fault_beside_the_answers_harms_nobody(bench: Bench, target: str) -> None:
    streams = bench.endless(3, stream=True)
    wait_for_first(streams)
    bench.faults.arm(target, "RuntimeError")
    assert stream_text(bench.short("one").result()) == stream_text(bench.expected)
    wait_until(lambda: bench.faults.num_armed(target) == 0, 5, "the fault has happened")
    check_goes_on(streams)
    cancel(bench, streams)
    bench.check_serves()


def test_an_engine_that_cannot_go_on_is_answered_for_and_started_until_it_starts(bench: Bench) -> None:
    """Its post-processing fails as a whole; of the new engines the first finds no memory for its cache."""
    engine = bench.engine()
    running = bench.endless(3) + bench.endless(3, stream=True)
    bench.wait_running(6)
    bench.faults.arm(KV_CACHE, "MemoryError")
    bench.faults.arm(POST_PROCESS, "RuntimeError")
    armed_s = time.monotonic()
    check_all_told(running, armed_s, ANSWER_LIMIT_S, "post-processing")
    check_unavailable(bench)
    bench.wait_serving_again(armed_s, "post-processing and a start without memory")
    assert bench.faults.num_armed(KV_CACHE) == 0
    assert bench.engine() != engine
    assert "engine 0 does not start" in bench.log()


def test_an_engine_stuck_in_a_step_is_ended_by_the_watchdog_and_shows_where(bench: Bench) -> None:
    engine = bench.engine()
    running = bench.endless(3) + bench.endless(3, stream=True)
    bench.wait_running(6)
    log_before = len(bench.log())
    bench.faults.arm(FORWARD, HANG)
    armed_s = time.monotonic()
    assert not bench.generates(timeout_s=1.0)
    check_all_told(running, armed_s, STEP_TIMEOUT_S + NOTICED_S, "stuck in a forward")
    check_unavailable(bench)
    bench.wait_serving_again(armed_s, "stuck in a forward")
    assert bench.engine() != engine
    log = bench.log()[log_before:]
    assert f"stuck, without a step for {STEP_TIMEOUT_S:g} s" in log
    assert "Fatal Python error: Aborted" in log and "in _fail" in log


def test_an_engine_that_was_stopped_while_idle_is_ended_once_it_does_not_answer(bench: Bench) -> None:
    bench.wait_idle()
    engine = bench.engine()
    os.kill(engine, signal.SIGSTOP)
    asked_s = time.monotonic()
    check_all_told([bench.short("asked")], asked_s, STEP_TIMEOUT_S + NOTICED_S, "stopped while idle")
    check_unavailable(bench)
    bench.wait_serving_again(asked_s, "stopped while idle")
    assert bench.engine() != engine


def test_too_little_memory_says_so_and_too_many_deaths_unload_the_model(bench: Bench) -> None:
    server, name = bench.server, "fragile"
    known = set(engine_process_ids(server))
    arguments = {**ARGUMENTS, "model": str(bench.model), "max_engine_restarts": 1}
    too_large = {"block_size": 1024, "num_gpu_blocks_override": 1_000_000}
    write_model_repository(bench.folder / "models", {name: {**arguments, **too_large}})
    status, answer = http_post(server, f"/v2/repository/models/{name}/load", b"{}", timeout_s=120)
    assert status == 400 and "the KV cache of 1000000 blocks of 1024 tokens" in answer["error"], answer
    assert set(engine_process_ids(server)) == known

    shutil.rmtree(bench.folder / "models" / name)
    write_model_repository(bench.folder / "models", {name: arguments})
    assert http_post(server, f"/v2/repository/models/{name}/load", b"{}", timeout_s=120)[0] == 200
    for is_last in (False, True):
        (engine,) = set(engine_process_ids(server)) - known
        request = GrpcRequest(server, model=name, text_input="x", stream=True, sampling_parameters=ENDLESS)
        request.wait_first()
        os.kill(engine, signal.SIGKILL)
        check_all_told([request], time.monotonic(), ANSWER_LIMIT_S, "killed")
        if not is_last:
            wait_until(lambda: generates(server, name), SERVE_AGAIN_LIMIT_S, "serving again")
    unready_s = wait_until(lambda: not server.is_model_ready(name), 10, "the model is not ready")
    print(f"killed once too often: not ready {unready_s:.2f} s after its client was told")
    status, answer = http_generate(server, model=name, text_input="x", max_tokens=1)
    assert status in (400, 404), answer
    bench.check_serves()  # the other model


def generates(server: TritonServer, model: str) -> bool:
    return bool(http_generate(server, model=model, text_input="x", max_tokens=1)[0] == 200)


def wait_for_first(streams: list[GrpcRequest]) -> None:
    for stream in streams:
        stream.wait_first()


def check_goes_on(streams: list[GrpcRequest]) -> None:
    """Each brings more."""
    before = [len(stream.responses) for stream in streams]
    for stream, count in zip(streams, before, strict=True):
        wait_until(lambda stream=stream, count=count: len(stream.responses) > count + 3, 10, "more")  # type: ignore[misc]
        assert stream.responses[-1].error is None


def cancel(bench: Bench, streams: list[GrpcRequest]) -> None:
    bench.wait_running(len(streams))  # else the metrics may still tell of the idle time before them
    for stream in streams:
        stream.cancel()
        stream.result()
    bench.wait_idle()


def check_all_told(requests: list[GrpcRequest], since_s: float, limit_s: float, what: str) -> None:
    ends_s = []
    for request in requests:
        assert stream_error(request.result()).startswith("INTERNAL: ")
        assert request.end_s is not None
        ends_s.append(request.end_s - since_s)
    print(f"{what}: {len(requests)} told within {max(ends_s):.2f} s")
    assert max(ends_s) < limit_s


def check_unavailable(bench: Bench) -> None:
    status, answer = http_generate(bench.server, text_input="x", max_tokens=1)
    assert (status, answer["error"][:13]) == (400, "UNAVAILABLE: "), answer
    assert not bench.generates()
