"""Clients that do not read, two thousand at once, and a stop while all wait: who is answered, what it costs others."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from deepinfer_backend.triton.server import TritonServer
from tests.support.long_text_model import make_long_text_model
from tests.support.silent_clients import SilentGrpcClient, SilentHttpClient
from tests.support.triton_client import (
    GrpcRequest,
    build_message,
    http_generate,
    http_stream,
    read_message,
    stream_error,
    stream_text,
)
from tests.support.triton_server import read_metrics, running_processes, running_server, wait_until

MAX_QUEUE_SIZE = 64
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 10,
    "kv_cache_memory_bytes": 200_000_000,
    "max_queue_size": MAX_QUEUE_SIZE,
}
ENDLESS: dict[str, Any] = {"max_tokens": 60_000, "ignore_eos": True, "temperature": 0}
INTERMEDIATE_SIZE = 98_304
NUM_STREAMS = 8
NUM_UNREAD_TOKENS = 1_000
MIN_PACE = 0.5  # of the usual, on a machine with other work
MEASURED_S = 3.0
MAX_GROWTH_BYTES = 64 * 2**20
FREED_LIMIT_S = 5.0
NUM_CONNECTIONS = 2_000
ALL_ANSWERED_LIMIT_S = 120.0
DRAIN_TIMEOUT_S = 2.0
SLACK_S = 4.0
EXIT_LIMIT_S = 15.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of some 10 ms: these clients share two cores with the server, and must be able to follow it."""
    return make_long_text_model(tmp_path_factory.mktemp("model"), intermediate_size=INTERMEDIATE_SIZE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("hard-clients")
    with running_server(folder, {"deepinfer": {**ARGUMENTS, "model": str(model)}}) as running:
        yield running


def wait_idle(server: TritonServer, limit_s: float = FREED_LIMIT_S) -> float:
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    return wait_until(
        lambda: all(read_metrics(server)[f"deepinfer_{name}"] == 0 for name in names), limit_s, "the server is idle"
    )


def resident_bytes(server: TritonServer) -> dict[str, int]:
    """By process: "tritonserver", "stub" and "engine"."""
    found = {}
    for pid in server.process_ids():
        line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        name = "engine" if "engine_loop" in line else "stub" if "python_backend_stub" in line else "tritonserver"
        status = Path(f"/proc/{pid}/status").read_text()
        found[name] = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    return found


class Pace:
    """Tokens/s of streams, and of the engine as a whole, since construction."""

    def __init__(self, server: TritonServer, streams: list[GrpcRequest]) -> None:
        self._server = server
        self._streams = streams
        self._start_s = time.monotonic()
        self._before = self._counts()

    def _counts(self) -> tuple[int, float]:
        total = read_metrics(self._server)["deepinfer_generation_tokens_total"]
        return sum(len(each.token_ids) for stream in self._streams for each in list(stream.responses)), total

    def measure(self) -> tuple[float, float]:
        (streams, total), took_s = self._counts(), time.monotonic() - self._start_s
        return (streams - self._before[0]) / took_s, (total - self._before[1]) / took_s


def pace_over(server: TritonServer, streams: list[GrpcRequest]) -> tuple[float, float]:
    pace = Pace(server, streams)
    time.sleep(MEASURED_S)  # what is measured is a rate
    return pace.measure()


def test_clients_that_never_read_slow_nobody_down_and_get_everything_once_they_read(server: TritonServer) -> None:
    sampling = {"max_tokens": NUM_UNREAD_TOKENS, "ignore_eos": True, "temperature": 0, "logprobs": 5}
    asked: dict[str, Any] = {"text_input": "x", "return_logprobs": True, "exclude_input_in_output": True}
    http_asked = {**asked, **sampling}
    # The usual: two that ask for the same and read.
    streams = start_streams(server)
    reading = GrpcRequest(server, stream=True, **asked, sampling_parameters=sampling)
    reading_http: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: reading_http.extend(http_stream(server, stream=True, **http_asked)))
    thread.start()
    reading.wait_first()
    usual = pace_over(server, streams)
    expected = [token for response in reading.result() for token in response.token_ids]
    thread.join(60)
    assert len(expected) == NUM_UNREAD_TOKENS
    assert tokens_of(reading_http) == expected
    end_streams(server, streams)

    before = resident_bytes(server)
    streams = start_streams(server)
    silent = SilentGrpcClient(server, **asked, sampling_parameters=sampling)
    silent_http = SilentHttpClient(server, **http_asked)
    wait_until(lambda: read_metrics(server)["deepinfer_requests_running"] == NUM_STREAMS + 2, 30, "all run")
    pace = pace_over(server, streams)
    wait_until(lambda: read_metrics(server)["deepinfer_requests_running"] == NUM_STREAMS, 60, "theirs are computed")
    end_streams(server, streams)
    after = resident_bytes(server)
    growth = {name: after[name] - before[name] for name in before}
    print(
        f"8 streams beside 2 that read: {usual[0]:.0f} tokens/s, the engine {usual[1]:.0f}; beside 2 that do not: "
        f"{pace[0]:.0f} and {pace[1]:.0f}; MiB more: "
        + ", ".join(f"{name} {size / 2**20:.1f}" for name, size in growth.items())
    )
    assert pace[0] > MIN_PACE * usual[0] and pace[1] > MIN_PACE * usual[1]
    assert max(growth.values()) < MAX_GROWTH_BYTES

    responses = silent.read_all()
    assert [response.error for response in responses if response.error] == []
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert [token for response in responses for token in response.token_ids] == expected
    assert tokens_of(silent_http.read_all()) == expected


def start_streams(server: TritonServer) -> list[GrpcRequest]:
    streams = [
        GrpcRequest(server, text_input=f"{n}:", stream=True, sampling_parameters=ENDLESS) for n in range(NUM_STREAMS)
    ]
    for stream in streams:
        stream.wait_first()
    return streams


def end_streams(server: TritonServer, streams: list[GrpcRequest]) -> None:
    for stream in streams:
        stream.cancel()
        stream.result()
    wait_idle(server)


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    assert [event for event in events if "error" in event] == []
    lists = [event["token_ids"] for event in events]
    return [token for each in lists for token in (each if isinstance(each, list) else [each])]


@pytest.mark.parametrize("client_class", [SilentGrpcClient, SilentHttpClient])
def test_a_client_that_never_read_and_goes_away_frees_its_blocks(
    server: TritonServer, client_class: type[SilentGrpcClient] | type[SilentHttpClient]
) -> None:
    fields: dict[str, Any] = {"sampling_parameters": ENDLESS} if client_class is SilentGrpcClient else ENDLESS
    client = client_class(server, text_input="x", **fields)
    start = read_metrics(server)["deepinfer_generation_tokens_total"]
    # Far more than its windows hold.
    wait_until(
        lambda: read_metrics(server)["deepinfer_generation_tokens_total"] > start + NUM_UNREAD_TOKENS, 60, "tokens"
    )
    client.leave()
    print(f"{client_class.__name__} left: idle after {wait_idle(server):.2f} s")


def test_two_thousand_connections_are_each_answered_or_refused(server: TritonServer) -> None:
    """A half HTTP sockets that stay open, a half gRPC channels with a stream each; all there at once."""
    before, start_s = resident_bytes(server), time.monotonic()
    outcomes, most_s = asyncio.run(two_thousand(server))
    took_s, after = time.monotonic() - start_s, resident_bytes(server)
    idle_s = wait_idle(server)
    print(
        f"{NUM_CONNECTIONS} connections in {took_s:.1f} s, the slowest answer after {most_s:.1f} s: "
        + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        + f"; idle {idle_s:.2f} s later; MiB more: "
        + ", ".join(f"{name} {(after[name] - before[name]) / 2**20:.1f}" for name in before)
    )
    assert outcomes.total() == NUM_CONNECTIONS
    assert outcomes.keys() <= {"HTTP answered", "HTTP refused", "gRPC answered", "gRPC refused"}
    assert outcomes["HTTP answered"] and outcomes["gRPC answered"]
    assert outcomes["HTTP refused"] + outcomes["gRPC refused"] > 0, "the queue was never full"
    assert http_generate(server, text_input="x", max_tokens=1)[0] == 200


async def two_thousand(server: TritonServer) -> tuple[Counter[str], float]:
    """What became of them, and how long the slowest waited."""
    everybody_is_here = asyncio.Barrier(NUM_CONNECTIONS)
    waited_s: list[float] = []

    async def timed(ask: Any) -> str:
        start_s = time.monotonic()
        try:
            outcome: str = await asyncio.wait_for(ask, ALL_ANSWERED_LIMIT_S)
        except Exception as error:
            outcome = f"failed: {error!r}"
        waited_s.append(time.monotonic() - start_s)
        return outcome

    async def over_http() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        await everybody_is_here.wait()
        outcome = await timed(http_request(reader, writer))
        await everybody_is_here.wait()  # open until the last is answered
        writer.close()
        return outcome

    async def over_grpc() -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"localhost:{server.grpc_port}", options=options) as channel:
            await channel.channel_ready()
            await everybody_is_here.wait()
            outcome = await timed(grpc_request(channel))
            await everybody_is_here.wait()
        return outcome

    half = NUM_CONNECTIONS // 2
    outcomes = await asyncio.gather(*(over_http() for _ in range(half)), *(over_grpc() for _ in range(half)))
    return Counter(outcomes), max(waited_s)


async def http_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    body = json.dumps({"text_input": "x", "max_tokens": 2, "ignore_eos": True}).encode()
    head = f"POST /v2/models/deepinfer/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "transfer-encoding: chunked" in headers:
        answer = b""
        while size := int(await reader.readline(), 16):
            answer += (await reader.readexactly(size + 2))[:-2]
    else:
        answer = await reader.readexactly(int(headers.partition("content-length:")[2].split()[0]))
    return f"HTTP {outcome_of(json.loads(answer).get('error'))}"


async def grpc_request(channel: grpc.aio.Channel) -> str:
    sampling = {"max_tokens": 2, "ignore_eos": True}
    message = build_message("deepinfer", "", {}, [], {}, {"text_input": "x", "sampling_parameters": sampling})
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    responses = [read_message(each) async for each in stub.ModelStreamInfer(iter([message]))]
    assert len(responses) == 1 and responses[0].is_final
    return f"gRPC {outcome_of(responses[0].error)}"


def outcome_of(error: str | None) -> str:
    if error is None:
        return "answered"
    is_refusal = error.startswith("UNAVAILABLE: ") and f"max_queue_size is {MAX_QUEUE_SIZE}" in error
    return "refused" if is_refusal else error


def test_a_stop_under_load_answers_64_streams_and_the_queue_and_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="di", dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)  # whatever the server leaves there is seen
        arguments = {**ARGUMENTS, "model": str(model), "max_num_seqs": 48, "max_queue_size": 256}
        with running_server(tmp_path, {"deepinfer": arguments}, drain_timeout_s=DRAIN_TIMEOUT_S) as server:
            streams = [
                GrpcRequest(server, text_input=f"{n}:", stream=True, sampling_parameters=ENDLESS) for n in range(64)
            ]
            wait_until(lambda: read_metrics(server)["deepinfer_requests_running"] == 48, 30, "48 run")
            waiting = [GenerateCall(server) for _ in range(16)]
            wait_until(lambda: read_metrics(server)["deepinfer_requests_waiting"] == 32, 30, "32 wait")
            process_ids = server.process_ids()
            start_s = time.monotonic()
            server.stop()
            exit_s = time.monotonic() - start_s
            assert server.poll() == 0 and exit_s < EXIT_LIMIT_S
            ends = Counter[str]()
            for stream in streams:
                responses = stream.result(timeout_s=5)
                assert stream.end_s is not None and stream.end_s - start_s < DRAIN_TIMEOUT_S + SLACK_S
                if stream.rpc_error is not None:
                    ends["connection closed"] += 1
                elif responses[-1].error is not None:
                    assert stream_error(responses).startswith("UNAVAILABLE: ")
                    ends["UNAVAILABLE"] += 1
                else:
                    stream_text(responses)
                    ends["answered"] += 1
            http_ends = Counter(call.outcome(start_s + DRAIN_TIMEOUT_S + SLACK_S) for call in waiting)
            print(
                f"stop: exit after {exit_s:.1f} s; 64 streams {dict(ends)}; 16 over HTTP that waited {dict(http_ends)}"
            )
            wait_until(lambda: not running_processes(process_ids), 2, "no process is left")
            assert server.shared_memory_regions() == []
            assert list(Path(temporary).iterdir()) == []


class GenerateCall(threading.Thread):
    """One /generate without an end."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__(name="generate", daemon=True)
        self._server = server
        self._outcome = ""
        self._end_s = 0.0
        self.start()

    def run(self) -> None:
        try:
            status, answer = http_generate(self._server, text_input="x", **ENDLESS)
            self._outcome = f"{status} {answer.get('error', 'answered')[:11]}"
        except OSError:
            self._outcome = "connection closed"
        self._end_s = time.monotonic()

    def outcome(self, limit_s: float) -> str:
        """Known by `limit_s` (time.monotonic)."""
        self.join(max(0.0, limit_s - time.monotonic()))
        assert not self.is_alive() and self._end_s < limit_s
        return self._outcome
