"""20,000 random and mutated requests: each is answered, in time and in words that blame the request, and nothing of the
server is disturbed.

A request depends on the seed, its wire and its number alone. A failure prints how to send that one by itself.

What these requests leave out, because it ends tritonserver 2.51 itself, before it reaches a model:

- over HTTP, a tensor's value nested 50,000 lists deep: its JSON reader overflows the stack (10,000 is sent here);
- over gRPC, a message for a model or version that is not there, in a stream right behind the answer of one that is:
  `ASSERTION FAILED: !byte_buffer->Valid()` (here such a message has a stream of its own);
- over gRPC, `input_ids` of shape [2**62] with no data: four bytes each are 2**64, which Triton takes for 0, and the
  stub ends with `array is too big` before any Python of ours runs;
- a request of tens of megabytes where /dev/shm is small.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.fuzz_answer import Answer
from tests.support.fuzz_grpc import GrpcConnection, generate_message, random_grpc_message
from tests.support.fuzz_http import HttpConnection, generate_request, random_http_request
from tests.support.tiny_text_model import make_tiny_text_model
from tests.support.triton_server import read_metrics, running_server, wait_until

SEED = os.environ.get("DEEPINFER_FUZZ_SEED", "4")
ONLY = os.environ.get("DEEPINFER_FUZZ_ONLY")
"""The number of one request, to send it by itself."""

NUM_REQUESTS_PER_WIRE = 10_000
NUM_CLIENTS = 16
GOOD_INTERVAL = 50  # requests between two that are right and must be answered as ever
ANSWER_TIMEOUT_S = 60.0
MAX_COMPLAINTS = 5
MAX_ERROR_CHARS = 1_000

ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 512,
    "max_n": 4,
    "max_beam_width": 4,
    "grammar_compile_timeout_s": 2.0,
}

# A timeout among a request's parameters may pass.
OUR_WORDS = ("INVALID_ARG: ", "CANCELLED: ", "UNSUPPORTED: ")

# What Triton 2.51 answers with a 5xx before any model hears of the request: its HTTP frontend's own JSON reader.
TRITONS_5XX = re.compile(
    r"failed to parse the request JSON buffer: "
    r"|attempt to get members for non-object"
    r"|Unable to parse JSON bytes array: "
    r"|Unable to parse '(data|id)': "
    r"|parameter key '.*' was not found in the JSON"
    r"|Expected JSON object for keyword: 'parameters'"
    r"|HTTP end point doesn't support models with decoupled transaction policy",
    re.DOTALL,
)
# What it answers otherwise, with a 4xx or over gRPC.
TRITONS_OWN = re.compile(
    r"(?:\[request id: .*\] )?"
    r"(?:Not Found$|Method Not Allowed$"
    r"|Request for unknown model: "
    r"|failed to get model version from specified version string "
    r"|invalid model version specified "
    r"|Unsupported content-encoding, "
    r"|(?:Converting keyword: 'parameters': )?parameter '.*' has invalid type\. "
    r"|invalid value (?:type )?for '"
    r"|parameter keys starting with 'triton_' are reserved "
    r"|string correlation ID cannot be longer than "
    r"|The schema can not convert input '.*' to tensor with proper shape"
    r"|generate expects model to produce exactly 1 response"
    r"|input '.*' already exists in request"
    r"|input byte size mismatch for input "
    r"|inference input '.*' data-type is "
    r"|(?:expected 1|unexpected number of) string elements "
    r"|unexpected (?:inference input|inference output|shape for input|explicit tensor data for input tensor) "
    r"|incomplete string (?:data|length indicator) for inference input "
    r"|unable to find data for input tensor "
    r"|contents field must not be specified when using raw_input_contents "
    r"|All input dimensions should be specified for input "
    r"|'shared_memory_\w+' (?:can not be specified without|must be specified along with) "
    r"|Unable to find shared memory region: )",
    re.DOTALL,
)


@dataclass(frozen=True)
class Wire:
    """How to make requests of one kind and send them. `good` is right and always has the same answer."""

    name: str
    connect: Callable[[TritonServer], Any]
    make: Callable[[Random], Any]
    good: Any

    def request(self, number: int) -> Any:
        return self.make(Random(f"{SEED} {self.name} {number}"))


_GOOD = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
WIRES = [
    Wire(
        "http",
        lambda server: HttpConnection(server.http_port, ANSWER_TIMEOUT_S),
        random_http_request,
        generate_request({"text_input": "The sea is", **_GOOD}),
    ),
    Wire(
        "grpc",
        lambda server: GrpcConnection(server.grpc_port, ANSWER_TIMEOUT_S),
        random_grpc_message,
        generate_message({"text_input": "The sea is", "sampling_parameters": json.dumps(_GOOD)}),
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    model = make_tiny_text_model(folder)
    with running_server(folder, {"deepinfer": {**ENGINE_ARGUMENTS, "model": str(model)}}) as running:
        yield running


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_no_request_is_left_unanswered_or_disturbs_the_server(server: TritonServer, wire: Wire) -> None:
    expected = _ask_once(server, wire, wire.good)
    assert expected.error is None and expected.outputs
    processes = _serving_processes(server)

    numbers = range(NUM_REQUESTS_PER_WIRE) if ONLY is None else [int(ONLY)]
    complaints = _send_all(server, wire, numbers, expected)
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)

    assert _ask_once(server, wire, wire.good) == expected
    assert _serving_processes(server) == processes, "a process ended or was started again"
    wait_until(lambda: not any(_load(server)), 10, "nothing runs, waits or holds KV blocks")
    assert server.log_file is not None
    log = server.log_file.read_text(encoding="utf-8", errors="replace")
    # Of ours, at the beginning of a line: what a request has in it is escaped and stands within one.
    faults = re.findall(r"^(?:Traceback|[-0-9]+ [:,0-9]+ (?:ERROR|CRITICAL)).*", log, re.MULTILINE)
    assert not faults, faults[:MAX_COMPLAINTS]


def _ask_once(server: TritonServer, wire: Wire, request: Any) -> Answer:
    connection = wire.connect(server)
    try:
        answer = connection.ask(request)
        assert isinstance(answer, Answer)
        return answer
    finally:
        connection.close()


def _send_all(server: TritonServer, wire: Wire, numbers: Sequence[int], expected: Answer) -> list[str]:
    """What is wrong with the answers; stops early when that is enough."""
    complaints: list[str] = []

    def send(client: int) -> None:
        connection = wire.connect(server)
        for number in numbers[client::NUM_CLIENTS]:
            if len(complaints) >= MAX_COMPLAINTS:
                break
            request = wire.request(number)
            try:
                complaint = _complaint(connection.ask(request))
                if number % GOOD_INTERVAL == 0 and connection.ask(wire.good) != expected:
                    complaint = "the good request behind it was not answered as in quiet"
            except Exception as error:
                complaint = f"{type(error).__name__}: {error}"
                connection.close()
                connection = wire.connect(server)
            if complaint is not None:
                complaints.append(
                    f"{wire.name} request {number}: {complaint}\n  by itself: DEEPINFER_FUZZ_SEED={SEED} "
                    f"DEEPINFER_FUZZ_ONLY={number} pytest {Path(__file__).name} -k {wire.name}\n  {request!r:.600}"
                )
        connection.close()

    clients = [threading.Thread(target=send, args=(client,), daemon=True) for client in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return complaints


def _complaint(answer: Answer) -> str | None:
    """Why a server must not answer so."""
    error, status = answer.error, answer.status
    if error is None:
        return None if status in (None, 200) else f"status {status} without an error"
    if answer.is_refused_by_protocol:
        return None
    if error.startswith(OUR_WORDS):
        if status is not None and status >= 500:
            return f"status {status} for a request that is wrong: {error}"
        is_short_line = len(error) <= MAX_ERROR_CHARS and error.isprintable()
        return None if is_short_line else f"an error that a log cannot show: {error!r}"
    if status is not None and status >= 500:
        return None if TRITONS_5XX.match(error) else f"status {status}, not one of Triton's own: {error}"
    return None if TRITONS_OWN.match(error) else f"neither ours nor Triton's: {error}"


def _serving_processes(server: TritonServer) -> set[int]:
    """All but those that compile grammars, which are ended when one takes too long."""
    return {pid for pid in server.process_ids() if b"grammar_compiler" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def _load(server: TritonServer) -> list[float]:
    metrics = read_metrics(server)
    return [
        metrics[name]
        for name in ("deepinfer_requests_running", "deepinfer_requests_waiting", "deepinfer_kv_cache_usage_ratio")
    ]
