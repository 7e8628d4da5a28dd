"""Who is let in, for how long, and who is put out by his id; slow readers; what the log says of all of them.

With a fake engine and a fake Triton; on the real server in test_admission_live.py.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.errors import DeepInferError, EngineError
from tests.support import fake_triton
from tests.support.fake_engine import FakeEngine, output
from tests.support.fake_frontend import Engines, assert_failed, assert_served, running_frontend, start_request
from tests.support.fake_triton import Request, TritonError
from tests.support.triton_server import wait_until

from deepinfer_backend.triton.frontend import Frontend  # isort: skip (after fake_triton)
from deepinfer_backend.triton.request_log import MAX_REFUSALS_PER_SECOND  # isort: skip

assert fake_triton

REQUEST_LOG = "deepinfer_backend.triton.request_log"


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def frontend(engines: Engines) -> Iterator[Frontend]:
    with running_frontend(engines) as running:
        yield running


@pytest.fixture
def engine(frontend: Frontend, engines: Engines) -> FakeEngine:
    return engines.next()


def send(frontend: Frontend, **request: Any) -> Request:
    sent = Request(**{"input_ids": [1], **request})
    frontend.accept([sent])
    return sent


def cancel_by_id(frontend: Frontend, cancelled_id: str, **request: Any) -> Request:
    sent = Request(cancel_request_id=cancelled_id, **request)
    frontend.accept([sent])
    return sent


# ---- the queue's size ----


def test_a_full_queue_refuses_at_once_with_both_numbers_and_takes_again_when_one_has_started(engines: Engines) -> None:
    with running_frontend(engines, max_queue_size=3) as frontend:
        engine = engines.next()
        waiting = [start_request(frontend, engine, stream=True) for _ in range(3)]
        refused = send(frontend)
        assert_failed(
            refused,
            TritonError.UNAVAILABLE,
            "UNAVAILABLE: 3 requests wait for their first token",
            "max_queue_size is 3",
        )
        engine.step(output(waiting[0][0], 5))  # it goes on, and waits no more
        wait_until(lambda: len(waiting[0][1].sender.sent) == 1, 5, "first response")
        start_request(frontend, engine)
        assert_failed(send(frontend), TritonError.UNAVAILABLE)


@pytest.mark.parametrize("end", ["answered", "failed", "cancelled", "engine died"])
def test_a_request_that_ended_leaves_room(engines: Engines, end: str) -> None:
    with running_frontend(engines, max_queue_size=1) as frontend:
        engine = engines.next()
        request_id, request = start_request(frontend, engine)
        match end:
            case "answered":
                engine.step(output(request_id, 5, "LENGTH"))
            case "failed":
                engine.refuse(request_id, EngineError("failed alone"))
            case "cancelled":
                request.sender.cancelled = True
            case "engine died":
                engine.die()
                engine = engines.next()
        request.sender.wait()
        wait_until(frontend.is_available, 10, "available")
        wait_until(lambda: not frontend._responder.open_streams(), 5, "forgotten")
        assert_served(frontend, engine)


def test_a_request_that_only_computes_and_has_nothing_yet_still_waits(engines: Engines) -> None:
    """Not streaming makes no difference: what counts is what the engine has brought."""
    with running_frontend(engines, max_queue_size=1) as frontend:
        engine = engines.next()
        request_id, request = start_request(frontend, engine)
        assert_failed(send(frontend), TritonError.UNAVAILABLE)
        engine.step(output(request_id, 5))
        wait_until(lambda: not frontend._responder._waiting, 5, "started")
        assert request.sender.sent == []
        start_request(frontend, engine)


def test_bad_refused_and_cancelling_requests_take_no_room(engines: Engines) -> None:
    with running_frontend(engines, max_queue_size=1) as frontend:
        engine = engines.next()
        for _ in range(5):
            frontend.accept([bad := Request(input_ids=[1], text_input="x"), absent := Request(cancel_request_id="no")])
            assert_failed(bad, TritonError.INVALID_ARG)
            assert_failed(absent, TritonError.INVALID_ARG)
        start_request(frontend, engine, request_id="a")
        refused = [send(frontend) for _ in range(5)]
        for request in refused:
            assert_failed(request, TritonError.UNAVAILABLE)
        cancelling = cancel_by_id(frontend, "a")  # a full queue is when it is needed
        cancelling.sender.wait()
        assert cancelling.sender.error is None
        assert_served(frontend, engine)


def test_a_full_queue_is_told_before_the_request_is_read(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_frontend(engines, max_queue_size=1) as frontend:
        start_request(frontend, engines.next())
        monkeypatch.setattr(frontend, "_parse_request", lambda *_: pytest.fail("it was read"))
        assert_failed(send(frontend), TritonError.UNAVAILABLE, "max_queue_size is 1")


def test_the_limit_is_exact_when_many_threads_ask_at_once(engines: Engines) -> None:
    num_threads, limit = 8, 50
    with running_frontend(engines, max_queue_size=limit) as frontend:
        engines.next()
        requests = [[Request(input_ids=[1]) for _ in range(25)] for _ in range(num_threads)]
        barrier = threading.Barrier(num_threads)

        def accept(own: list[Request]) -> None:
            barrier.wait()
            for request in own:
                frontend.accept([request])

        threads = [threading.Thread(target=accept, args=(own,)) for own in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        flat = list(chain(*requests))
        wait_until(lambda: sum(request.sender.final.is_set() for request in flat) >= len(flat) - limit, 10, "refused")
        assert sum(not request.sender.final.is_set() for request in flat) == limit


def test_no_limit_is_zero(engines: Engines) -> None:
    with running_frontend(engines, max_queue_size=0) as frontend:
        engine = engines.next()
        for _ in range(50):
            start_request(frontend, engine)


# ---- deadlines and priority ----


def added(frontend: Frontend, engine: FakeEngine, **request: Any) -> EngineRequest:
    frontend.accept([Request(**{"input_ids": [1], **request})])
    return engine.next_request()


def test_queue_timeout_and_arrival_reach_the_engine(engines: Engines) -> None:
    with running_frontend(engines, queue_timeout_s=3.0) as frontend:
        engine = engines.next()
        before_s = time.monotonic()
        default = added(frontend, engine)
        assert default.queue_timeout_s == 3.0
        assert before_s <= default.arrival_s <= time.monotonic()
        assert added(frontend, engine, parameters={"queue_timeout": 1_500_000}).queue_timeout_s == 1.5
        assert added(frontend, engine, parameters={"queue_timeout": 0}).queue_timeout_s == 3.0
        in_tensor = added(frontend, engine, sampling_parameters=json.dumps({"queue_timeout": 250_000}))
        assert in_tensor.queue_timeout_s == 0.25


def test_without_a_default_there_is_no_queue_timeout(frontend: Frontend, engine: FakeEngine) -> None:
    assert added(frontend, engine).queue_timeout_s is None


def test_a_queue_timeout_that_passes_before_the_prompt_is_tokenized_ends_the_request(
    frontend: Frontend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    process = frontend._input_processor.process

    def slow_process(*args: Any, **kwargs: Any) -> Any:
        assert may_go_on.wait(10)
        return process(*args, **kwargs)

    monkeypatch.setattr(frontend._input_processor, "process", slow_process)
    first, behind = send(frontend), send(frontend, parameters={"queue_timeout": 20_000})
    time.sleep(0.03)
    may_go_on.set()
    assert_failed(behind, TritonError.CANCELLED, "CANCELLED: queue_timeout of 0.02 s passed before a step began")
    engine.next_request()
    assert engine.added.empty()
    assert not first.sender.final.is_set()


@pytest.mark.parametrize("stream", [True, False])
def test_request_timeout_s_is_the_deadline_of_requests_without_their_own(engines: Engines, stream: bool) -> None:
    """And of a stream the client keeps what it got."""
    with running_frontend(engines, request_timeout_s=0.2) as frontend:
        engine = engines.next()
        request_id, request = start_request(frontend, engine, stream=stream)
        engine.step(output(request_id, 5))
        patient_id, patient = start_request(frontend, engine, parameters={"timeout": 60_000_000})
        assert_failed(request, TritonError.CANCELLED, "CANCELLED: timeout of 0.2 s passed")
        assert request.sender.outputs("token_ids") == ([[5]] if stream else [])
        wait_until(lambda: engine.aborted == [request_id], 5, "the engine is told")
        engine.step(output(patient_id, 6, "LENGTH"))
        patient.sender.wait()
        assert patient.sender.error is None


def test_priority_is_taken_from_parameters_or_sampling_parameters_and_0_is_the_default(engines: Engines) -> None:
    with running_frontend(engines, default_priority=7) as frontend:
        engine = engines.next()
        assert [
            added(frontend, engine, **request).priority
            for request in (
                {},
                {"parameters": {"priority": 0}},
                {"parameters": {"priority": -3}},
                {"parameters": {"priority": "2"}},
                {"sampling_parameters": '{"priority": 4}'},
                {"sampling_parameters": '{"priority": 4}', "parameters": {"priority": 5}},
            )
        ] == [7, 7, -3, 2, 4, 4]


@pytest.mark.parametrize("name", ["priority", "timeout", "queue_timeout"])
@pytest.mark.parametrize("value", ["x", 1.5, None, True, 2**63])
def test_what_is_no_number_is_refused_by_name(frontend: Frontend, engine: FakeEngine, name: str, value: Any) -> None:
    request = send(frontend, sampling_parameters=json.dumps({name: value}))
    assert_failed(request, TritonError.INVALID_ARG, f"INVALID_ARG: {name} is ", "must be a whole number from")


# ---- cancel by the request's id ----


def test_cancel_by_id_ends_all_requests_of_that_id_wherever_they_are_and_nobody_else(
    frontend: Frontend, engine: FakeEngine
) -> None:
    running_id, running = start_request(frontend, engine, request_id="mine", stream=True)
    engine.step(output(running_id, 5))
    wait_until(lambda: len(running.sender.sent) == 1, 5, "first response")
    queued_id, queued = start_request(frontend, engine, request_id="mine")
    other_id, other = start_request(frontend, engine, request_id="mine too")
    nameless_id, nameless = start_request(frontend, engine)
    started_s = time.monotonic()
    cancelling = cancel_by_id(frontend, "mine", request_id="mine")  # an own id of that name does not matter
    for request in (running, queued):
        assert_failed(request, TritonError.CANCELLED, "CANCELLED: cancelled by the request's id")
    cancelling.sender.wait()
    assert time.monotonic() - started_s < 0.1
    assert [response.tensors for response in cancelling.sender.sent if response] == [[]]
    assert cancelling.sender.error is None
    assert cancelling.sender.num_finals == len(cancelling.sender.sent) == 1
    assert running.sender.outputs("token_ids") == [[5]]
    wait_until(lambda: engine.aborted == [running_id, queued_id], 5, "the engine is told")
    engine.step(output(other_id, 6, "LENGTH"), output(nameless_id, 7, "LENGTH"))
    for request in (other, nameless):
        request.sender.wait()
        assert request.sender.error is None


def test_cancel_by_id_reaches_a_request_whose_prompt_waits_to_be_tokenized(
    frontend: Frontend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, entered = threading.Event(), threading.Event()
    process = frontend._input_processor.process

    def slow_process(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        assert may_go_on.wait(10)
        return process(*args, **kwargs)

    monkeypatch.setattr(frontend._input_processor, "process", slow_process)
    requests = [send(frontend, request_id="x") for _ in range(2)]
    assert entered.wait(10)
    cancel_by_id(frontend, "x").sender.wait()
    for request in requests:
        assert_failed(request, TritonError.CANCELLED)
    may_go_on.set()
    late = engine.next_request().request_id  # the one in work; the one behind it never comes
    wait_until(lambda: engine.aborted == [late], 5, "aborted")
    monkeypatch.undo()
    assert_served(frontend, engine)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"cancel_request_id": "nobody"}, "no request with the id 'nobody' is running"),
        ({"cancel_request_id": ""}, "cancel_request_id is empty: must have at least 1 character"),
        ({"cancel_request_id": b"\xff"}, "cancel_request_id is not valid UTF-8"),
        ({"cancel_request_id": "a", "text_input": "b"}, "text_input is set: must be left out with cancel_request_id"),
        ({"cancel_request_id": "a", "stream": True}, "stream is set: must be left out with cancel_request_id"),
        (
            {"cancel_request_id": "a", "parameters": {"max_tokens": 3, "sequence_id": 1}},
            "max_tokens is set: must be left out with cancel_request_id",
        ),
    ],
)
def test_a_cancel_that_makes_no_sense_is_told_why(
    frontend: Frontend, engine: FakeEngine, request_: dict[str, Any], message: str
) -> None:
    start_request(frontend, engine)  # without an id
    request = Request(**request_)
    frontend.accept([request])
    assert_failed(request, TritonError.INVALID_ARG, f"INVALID_ARG: {message}")


# ---- slow readers ----


def test_the_engine_is_read_whatever_the_responder_waits_for_and_no_token_is_lost(
    frontend: Frontend, engine: FakeEngine
) -> None:
    """One send takes as long as 3 s of 64 streams at 100 steps a second; then everybody has everything, merged."""
    num_streams, num_steps = 64, 300
    streams = [start_request(frontend, engine, stream=True) for _ in range(num_streams)]
    may_go_on, is_blocked = threading.Event(), threading.Event()
    blocked = streams[0][1].sender
    blocked_send = blocked.send

    def slow_send(*args: Any, **kwargs: Any) -> None:
        is_blocked.set()
        assert may_go_on.wait(30)
        blocked_send(*args, **kwargs)

    blocked.send = slow_send  # type: ignore[method-assign]
    engine.step(*(output(request_id, 0) for request_id, _ in streams))
    assert is_blocked.wait(10)
    for step in range(1, num_steps):
        is_last = step == num_steps - 1
        engine.step(*(output(request_id, step, "LENGTH" if is_last else "NONE") for request_id, _ in streams))
    wait_until(lambda: engine.num_rounds_left == 0, 20, "every round is taken from the engine")
    assert not may_go_on.is_set()
    may_go_on.set()
    for _, request in streams:
        request.sender.wait()
        assert list(chain.from_iterable(request.sender.outputs("token_ids"))) == list(range(num_steps))
        assert len(request.sender.sent) <= 3
        assert request.sender.num_finals == 1


def test_what_waits_behind_a_slow_send_does_not_grow_with_the_time_that_it_takes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled or late request is told of once, and no request beyond the queue's size is let in meanwhile."""
    with running_frontend(engines, max_queue_size=8) as frontend:
        engine = engines.next()
        blocked_id, blocked = start_request(frontend, engine, stream=True)
        waiting = [start_request(frontend, engine, parameters={"timeout": 1})[1] for _ in range(4)]
        gone = [start_request(frontend, engine)[1] for _ in range(3)]
        may_go_on, is_blocked = threading.Event(), threading.Event()
        send_ = blocked.sender.send

        def slow_send(*args: Any, **kwargs: Any) -> None:
            is_blocked.set()
            assert may_go_on.wait(30)
            send_(*args, **kwargs)

        blocked.sender.send = slow_send  # type: ignore[method-assign]
        failed: list[str] = []
        fail, open_streams = frontend._responder.fail, frontend._responder.open_streams
        num_looks = 0

        def noted_fail(request_id: str, error: DeepInferError) -> None:
            failed.append(request_id)
            fail(request_id, error)

        def counted_open_streams() -> Any:
            nonlocal num_looks
            num_looks += 1
            return open_streams()

        monkeypatch.setattr(frontend._responder, "fail", noted_fail)
        engine.step(output(blocked_id, 5))
        assert is_blocked.wait(10)
        for request in gone:
            request.sender.cancelled = True
        wait_until(lambda: len(failed) >= 3, 5, "the watcher has seen them")
        monkeypatch.setattr(frontend._responder, "open_streams", counted_open_streams)
        wait_until(lambda: num_looks >= 6, 5, "it has looked again")
        assert len(failed) == len(set(failed))
        may_go_on.set()
        for request in (*waiting, *gone):
            assert_failed(request, TritonError.CANCELLED)
        blocked.sender.cancelled = True
        assert_failed(blocked, TritonError.CANCELLED)


# ---- the log ----


def lines_about(caplog: pytest.LogCaptureFixture, client_id: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if f"request {client_id}#" in record.getMessage()]


def test_each_request_that_ended_has_one_line_with_its_id_word_and_reason(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_frontend(engines, max_queue_size=2) as frontend:
        engine = engines.next()
        good_id, good = start_request(frontend, engine, request_id="good")
        engine.step(output(good_id, 5), output(good_id, 6, "LENGTH", num_prompt_tokens=1))
        good.sender.wait()
        bad = send(frontend, request_id="bad", text_input="my secret text", parameters={"top_p": 5})
        worse = send(frontend, request_id="worse", parameters={"seed": "my secret text"})
        gone = start_request(frontend, engine, request_id="gone")[1]
        gone.sender.cancelled = True
        slow = start_request(frontend, engine, request_id="slow", parameters={"timeout": 50_000})[1]
        full = send(frontend, request_id="full")
        for request in (bad, worse, gone, slow, full):
            request.sender.wait()
        named = start_request(frontend, engine, request_id="named")[1]
        cancel = cancel_by_id(frontend, "named", request_id="canceller")
        fault_id, fault = start_request(frontend, engine, request_id="fault\nforged line")
        engine.refuse(fault_id, EngineError("it broke"))
        for request in (named, cancel, fault):
            request.sender.wait()
    for client_id, level, ending in (
        ("good", "INFO", r"length; 1 prompt tokens \(0 cached\), 2 output tokens; queued .* s, total \d+\.\d{3} s"),
        ("bad", "INFO", r"INVALID_ARG: a request needs exactly one of .*: got text_input and input_ids; 0 "),
        ("worse", "INFO", r"INVALID_ARG: seed: must be an integer; 0 prompt tokens"),
        ("gone", "INFO", r"CANCELLED \(client\): the client cancelled or left; "),
        ("slow", "INFO", r"CANCELLED \(timeout\): timeout of 0.05 s passed before the answer; "),
        ("full", "WARNING", r"UNAVAILABLE \(queue_full\): 2 requests wait for their first token, .* is 2.*; "),
        ("named", "INFO", r"CANCELLED \(request_id\): cancelled by the request's id; "),
        ("canceller", "INFO", r"cancelled others, as it asked; "),
        (r"fault\nforged line", "ERROR", r"INTERNAL: it broke; "),
    ):
        (record,) = lines_about(caplog, client_id)
        assert record.levelname == level, client_id
        assert re.search(rf"fake\.\d+: {ending}", record.getMessage()), record.getMessage()
        assert "\n" not in record.getMessage()
    assert "secret" not in caplog.text


def test_with_enable_log_requests_there_is_a_line_with_prompt_and_parameters_when_it_comes(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_frontend(engines, enable_log_requests=True) as frontend:
        text = "The beginning\nof a long text " + "x" * 10_000
        parameters: dict[str, Any] = {"top_k": 3, "priority": 2, "timeout": 60_000_000}
        parameters["logit_bias"] = json.dumps({str(token_id): 1.0 for token_id in range(300)})
        send(frontend, request_id="text", text_input=text, input_ids=[1])  # one prompt too many: it does not arrive
        refused = Request(text_input=text, request_id="refused", parameters=parameters)  # this fake has no tokenizer
        tokens = Request(input_ids=list(range(100)), request_id="tokens")
        chat = Request(messages='[{"role": "user", "content": "hello\\n"}]', request_id="chat")
        frontend.accept([refused, tokens, chat])
        for request in (refused, chat):
            request.sender.wait()
    assert len(lines_about(caplog, "text")) == 1
    arrival, end = lines_about(caplog, "refused")
    message = arrival.getMessage()
    assert "prompt 'The beginning\\nof a long text xxxx" in message
    assert f"of {len(text)} characters; stream False, priority 2, timeout 60 s, queue_timeout none" in message
    assert "'top_k': 3" in message and len(message) < 2000
    assert "INVALID_ARG: text_input: this model has no tokenizer" in end.getMessage()
    assert "prompt [0, 1, 2, " in lines_about(caplog, "tokens")[0].getMessage()
    assert "of 100 tokens" in lines_about(caplog, "tokens")[0].getMessage()
    assert "prompt 'user: hello\\n' of 12 characters" in lines_about(caplog, "chat")[0].getMessage()


def test_a_flood_of_refused_requests_is_a_bounded_number_of_lines_and_none_is_uncounted(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    num_requests = 500
    with running_frontend(engines, max_queue_size=1) as frontend:
        engine = engines.next()
        started_s = time.monotonic()
        start_request(frontend, engine, request_id="waits")
        flood = [send(frontend) for _ in range(num_requests)]
        flood += [cancel_by_id(frontend, "nobody") for _ in range(num_requests)]
        for request in flood:
            request.sender.wait()
        num_seconds = int(time.monotonic() - started_s) + 1
        wait_until(lambda: "more requests ended" in caplog.text, 5, "the rest is told of, without another request")
    for kind in ("UNAVAILABLE (queue_full)", "INVALID_ARG"):
        messages = [record.getMessage() for record in caplog.records if record.name == REQUEST_LOG]
        own = [message for message in messages if f": {kind}" in message and " more requests " not in message]
        counted = [int(n) for message in messages for n in re.findall(rf"(\d+) {re.escape(kind)}(?:,|$)", message)]
        assert len(own) <= MAX_REFUSALS_PER_SECOND * (num_seconds + 1)
        assert len(own) + sum(counted) == num_requests
    assert sum(" more requests " in record.getMessage() for record in caplog.records) <= num_seconds + 2
