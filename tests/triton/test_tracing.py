"""A client's trace goes on through Triton into the engine's phases, and a collector cannot disturb anybody."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError, DeepInferError, RequestCancelledError
from tests.support import fake_triton
from tests.support.fake_engine import FakeEngine, output
from tests.support.fake_triton import Request
from tests.support.tiny_text_model import make_tiny_text_model
from tests.support.trace_collector import CollectedSpan, TraceCollector
from tests.support.triton_server import START_TIMEOUT_S, free_ports, wait_until

from deepinfer_backend.triton.frontend import Frontend  # isort: skip (after fake_triton)
from deepinfer_backend.triton.generate_request import RequestSummary  # isort: skip
from deepinfer_backend.triton.request_tracer import RequestTracer  # isort: skip
from deepinfer_backend.triton.tracing import TRACING_INSTALL, read_trace_context, start_tracer  # isort: skip

assert fake_triton

ARRIVAL_TIMEOUT_S = 30.0  # Triton sends its spans every 5 s
EXIT_TIMEOUT_S = 60.0
MODEL = "tiny"
OURS = {"llm_request", "queue", "prefill", "decode"}
TRITONS = {"InferRequest", MODEL}
SAMPLING = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class TracedServer:
    """`deepinfer serve` with a collector of its own."""

    collector: TraceCollector
    http_port: int
    grpc_port: int
    log: Path

    def generate(self, headers: dict[str, str] | None = None, **fields: Any) -> requests.Response:
        url = f"http://localhost:{self.http_port}/v2/models/{MODEL}/generate"
        return requests.post(url, json={"text_input": "The sea is", **SAMPLING, **fields}, headers=headers, timeout=60)


@dataclass(frozen=True)
class ClientSpan:
    """What a client that traces itself tells in its headers."""

    trace_id: str
    span_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.trace_id}-{self.span_id}-01"}


@pytest.fixture
def client() -> ClientSpan:
    return ClientSpan(secrets.token_hex(16), secrets.token_hex(8))


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    own = TraceCollector()
    yield own
    own.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedServer]:
    folder = tmp_path_factory.mktemp("traced")
    model = make_tiny_text_model(folder / "model")
    collector = TraceCollector()
    http_port, grpc_port, metrics_port = free_ports(3)
    options = {
        "model": f"{MODEL}={model}",
        "otlp-traces-endpoint": collector.endpoint,
        "device": "cpu",
        "num-gpu-blocks-override": 64,
        "http-port": http_port,
        "grpc-port": grpc_port,
        "metrics-port": metrics_port,
    }
    command = [str(Path(sys.executable).with_name("deepinfer")), "serve"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    output, log = folder / "output", folder / "log"
    with output.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    try:
        is_ready = lambda: "Ctrl-C" in output.read_text() or process.poll() is not None  # noqa: E731
        wait_until(is_ready, START_TIMEOUT_S, "the server is ready")
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        yield TracedServer(collector, http_port, grpc_port, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(EXIT_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        collector.close()


def wait_for_spans(collector: TraceCollector, trace_id: str, names: set[str]) -> dict[str, CollectedSpan]:
    wait_until(lambda: names <= collector.spans(trace_id).keys(), ARRIVAL_TIMEOUT_S, f"spans {sorted(names)}")
    return collector.spans(trace_id)


def send_over_http(server: TracedServer, client: ClientSpan) -> int:
    answer = server.generate(client.headers, return_num_input_tokens=True)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["num_input_tokens"])


def send_over_grpc(server: TracedServer, client: ClientSpan) -> int:
    answers: SimpleQueue[Any] = SimpleQueue()
    values = {"text_input": "The sea is", "return_num_input_tokens": True, "stream": True}
    inputs = []
    for name, value in values.items():
        is_bool = isinstance(value, bool)
        tensor = triton.InferInput(name, [1], "BOOL" if is_bool else "BYTES")
        inputs.append(tensor.set_data_from_numpy(np.array([value], dtype=bool if is_bool else object)))
    with triton.InferenceServerClient(f"localhost:{server.grpc_port}") as grpc_client:
        grpc_client.start_stream(lambda result, error: answers.put(error or result), headers=client.headers)
        grpc_client.async_stream_infer(MODEL, inputs, parameters=SAMPLING)
        first = answers.get(timeout=60)
        grpc_client.stop_stream()
    assert not isinstance(first, Exception), first
    return int(first.as_numpy("num_input_tokens")[0])


@pytest.mark.parametrize("send", [send_over_http, send_over_grpc])
def test_a_clients_trace_goes_on_through_triton_to_queue_prefill_and_decode(
    server: TracedServer, client: ClientSpan, send: Any
) -> None:
    before_ns = time.time_ns()
    num_input_tokens = send(server, client)
    after_ns = time.time_ns()
    spans = wait_for_spans(server.collector, client.trace_id, OURS | TRITONS)

    request = spans["llm_request"]
    assert spans["InferRequest"].parent_id == client.span_id
    assert spans[MODEL].parent_id == spans["InferRequest"].span_id
    assert request.parent_id == spans[MODEL].span_id
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent_id for span in (queue, prefill, decode)} == {request.span_id}

    assert before_ns <= spans[MODEL].start_ns <= request.start_ns == queue.start_ns
    assert queue.start_ns < queue.end_ns == prefill.start_ns < prefill.end_ns == decode.start_ns < decode.end_ns
    # The request itself ends after its answer was sent: the client may have it already.
    assert decode.end_ns <= min(request.end_ns, after_ns)

    assert request.service == "deepinfer"
    seconds = {name: value for name, value in request.attributes.items() if name.startswith("gen_ai.latency.")}
    assert seconds == {
        "gen_ai.latency.e2e": pytest.approx((request.end_ns - request.start_ns) / 1e9),
        "gen_ai.latency.time_in_queue": pytest.approx((queue.end_ns - queue.start_ns) / 1e9),
        "gen_ai.latency.time_to_first_token": pytest.approx((prefill.end_ns - request.start_ns) / 1e9),
        "gen_ai.latency.time_in_model_prefill": pytest.approx((prefill.end_ns - prefill.start_ns) / 1e9),
        "gen_ai.latency.time_in_model_decode": pytest.approx((decode.end_ns - decode.start_ns) / 1e9),
    }
    others = {name: value for name, value in request.attributes.items() if name not in seconds}
    assert others.pop("gen_ai.request.id")
    assert others == {
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.input_tokens": num_input_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": SAMPLING["max_tokens"],
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert request.error is None


def test_a_failed_requests_span_has_its_error(server: TracedServer, client: ClientSpan) -> None:
    answer = server.generate(client.headers, max_tokens=-1)
    assert answer.status_code == 400
    spans = wait_for_spans(server.collector, client.trace_id, {"llm_request", *TRITONS})
    error = spans["llm_request"].error
    assert error is not None and error.startswith("INVALID_ARG: max_tokens is -1")
    assert error in answer.json()["error"]
    assert spans["llm_request"].attributes["error.type"] == "INVALID_ARG"
    assert spans["llm_request"].parent_id == spans[MODEL].span_id
    assert not spans.keys() & (OURS - {"llm_request"}), "it came to none of them"


def test_requests_are_answered_while_the_collector_is_down_and_traced_when_it_is_back(
    server: TracedServer, client: ClientSpan
) -> None:
    def seconds_of_twenty_requests() -> float:
        start_s = time.monotonic()
        assert {server.generate().status_code for _ in range(20)} == {200}
        return time.monotonic() - start_s

    usual_s = seconds_of_twenty_requests()
    with server.collector.down():
        assert seconds_of_twenty_requests() < 3 * usual_s + 1.0
        wait_until(lambda: "spans for http" in server.log.read_text(), ARRIVAL_TIMEOUT_S, "the log tells of it")
    assert server.generate(client.headers).status_code == 200
    wait_for_spans(server.collector, client.trace_id, OURS)
    assert server.log.read_text().count("spans for http") == 1


def summary(client: ClientSpan, **fields: Any) -> RequestSummary:
    now_ns = time.monotonic_ns()
    whole = RequestSummary(
        request_id="a",
        trace_context=f'{{"traceparent": "{client.headers["traceparent"]}"}}',
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=2,
        arrival_time_ns=now_ns - 5000,
        first_scheduled_time_ns=now_ns - 4000,
        first_token_time_ns=now_ns - 3000,
        last_token_time_ns=now_ns - 2000,
        end_time_ns=now_ns,
        finish_reasons=("length",),
        error=None,
    )
    return replace(whole, **fields)


def test_a_request_that_ends_early_has_the_phases_that_it_reached(
    collector: TraceCollector, client: ClientSpan
) -> None:
    error = RequestCancelledError("the client left")
    tracer = RequestTracer(collector.endpoint, MODEL)
    cut_off = summary(client, num_output_tokens=1, last_token_time_ns=0, finish_reasons=(), error=error)
    tracer.record_request(cut_off)
    tracer.close()
    spans = collector.spans(client.trace_id)
    assert spans.keys() == {"llm_request", "queue", "prefill"}
    assert spans["llm_request"].error == "CANCELLED: the client left"


@pytest.mark.parametrize(
    "trace_context",
    ["", "no JSON", "[]", '{"traceparent": 1}', "{}", '{"traceparent": "00-0-0-01"}', '{"traceparent": "\u2603"}'],
)
def test_a_context_that_cannot_be_read_is_no_trace(
    collector: TraceCollector, client: ClientSpan, trace_context: str
) -> None:
    tracer = RequestTracer(collector.endpoint, MODEL)
    tracer.record_request(summary(client, trace_context=trace_context))
    tracer.record_request(summary(client))
    tracer.close()
    assert {span.trace_id for span in collector.spans(client.trace_id).values()} == {client.trace_id}
    assert collector.num_spans == len(OURS)


def test_a_trace_that_its_client_does_not_record_is_not_recorded(collector: TraceCollector, client: ClientSpan) -> None:
    tracer = RequestTracer(collector.endpoint, MODEL)
    context = f'{{"traceparent": "{client.headers["traceparent"][:-2]}00"}}'
    tracer.record_request(summary(client, trace_context=context))
    tracer.close()
    assert collector.num_spans == 0


@pytest.mark.parametrize("accepts", [False, True], ids=["refuses", "never answers"])
def test_a_dead_collector_costs_little_and_says_so_once(
    client: ClientSpan, caplog: pytest.LogCaptureFixture, accepts: bool
) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("localhost", port)) if accepts else nullcontext():
        tracer = RequestTracer(f"http://localhost:{port}/v1/traces", MODEL)
        start_s = time.monotonic()
        for _ in range(1000):  # twice as many spans as the queue holds
            tracer.record_request(summary(client))
        assert time.monotonic() - start_s < 10.0, "10 ms each, on a machine that does much else"
        start_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - start_s < 3.0
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("deepinfer_backend")]
    # The library itself says twice within 20 s only what it has not said last: perhaps in the test before.
    assert len(lines) == 1 or (accepts and not lines), lines
    assert all(line.startswith(f"spans for http://localhost:{port}/v1/traces: ") for line in lines)


def start_frontend(engine: FakeEngine) -> Frontend:
    return Frontend(
        model_name="fake",
        model_version="1",
        start_engine=lambda rank: engine,
        load_tokenizer=lambda info: None,
        give_up=lambda: None,
    )


class TracedRequest(Request):
    """Counts how often its trace was asked for."""

    num_reads = 0

    def trace(self) -> Any:
        self.num_reads += 1
        return SimpleNamespace(get_context=lambda: None)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepinfer_backend.triton.request_tracer")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)


@pytest.mark.usefixtures("without_library")
def test_without_an_endpoint_no_library_is_needed_and_no_trace_is_read() -> None:
    engine, request = FakeEngine(), TracedRequest(input_ids=[1])
    frontend = start_frontend(engine)
    try:
        frontend.accept([request])
        engine.step(output(engine.next_request().request_id, 5, "LENGTH"))
        request.sender.wait()
    finally:
        frontend.close()
    assert request.sender.outputs("token_ids") == [[5]]
    assert request.num_reads == 0


@pytest.mark.usefixtures("without_library")
def test_a_missing_library_is_named_with_its_command() -> None:
    engine = FakeEngine(EngineConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces"))
    with pytest.raises(ConfigError, match=f"opentelemetry.*: {TRACING_INSTALL}"):
        start_frontend(engine)
    assert engine.is_closed
    assert start_tracer(None, MODEL) is None


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(DeepInferError, match=r"otlp_traces_endpoint is 'localhost:4317': must begin with http"):
        EngineConfig(otlp_traces_endpoint="localhost:4317")


def test_a_request_without_a_trace_has_no_context() -> None:
    assert read_trace_context(SimpleNamespace()) == "", "a Triton that has no such method"
    assert read_trace_context(TracedRequest(input_ids=[1])) == "", "one that does not trace it"
