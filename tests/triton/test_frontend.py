"""The frontend's threads with a fake engine and a fake Triton: one FINAL on every path, errors that stay alone."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.engine.messages import Embedding, EmbeddingParams, EngineStats
from deepinfer_backend.errors import ConfigError, EngineError, InvalidRequestError
from tests.support import fake_triton
from tests.support.fake_engine import FakeEngine, output, prompt_logprobs_of
from tests.support.fake_frontend import Engines, assert_failed, assert_served, running_frontend, start_request
from tests.support.fake_triton import MetricFamily, Request, TritonError
from tests.support.triton_server import wait_until

from deepinfer_backend.triton.frontend import Frontend  # isort: skip (after fake_triton)
from deepinfer_backend.triton.model_config import OUTPUTS, RETURN_INPUTS  # isort: skip

assert fake_triton

CANCEL_LIMIT_S = 0.1
SLACK_S = 0.1


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


def test_final_is_on_the_last_data_response_of_a_stream(frontend: Frontend, engine: FakeEngine) -> None:
    request_id, request = start_request(frontend, engine, stream=True, return_finish_reason=True)
    engine.step(output(request_id, 5))
    wait_until(lambda: len(request.sender.sent) == 1, 5, "first response")
    engine.step(output(request_id, 6, "LENGTH"))
    request.sender.wait()
    assert request.sender.outputs("token_ids") == [[5], [6]]
    assert request.sender.outputs("finish_reason") == [["None"], ["length"]]
    assert request.sender.num_finals == 1


def test_one_response_without_stream_has_all_tokens(frontend: Frontend, engine: FakeEngine) -> None:
    request_id, request = start_request(frontend, engine, return_finish_reason=True)
    for token_id in (5, 6):
        engine.step(output(request_id, token_id))
    engine.step(output(request_id, 7, "STOP"))
    request.sender.wait()
    assert request.sender.outputs("token_ids") == [[5, 6, 7]]
    assert request.sender.outputs("finish_reason") == [["stop"]]


def test_an_engine_that_outruns_the_client_gets_fewer_longer_responses(frontend: Frontend, engine: FakeEngine) -> None:
    request_id, request = start_request(frontend, engine, stream=True)
    may_go_on, send = threading.Event(), request.sender.send

    def slow_send(*args: Any, **kwargs: Any) -> None:
        assert may_go_on.wait(10)
        send(*args, **kwargs)

    request.sender.send = slow_send  # type: ignore[method-assign]
    for token_id in range(50):
        engine.step(output(request_id, token_id))
    engine.step(output(request_id, 50, "LENGTH"))
    wait_until(lambda: engine.num_rounds_left == 0, 5, "all rounds are read")
    may_go_on.set()
    request.sender.wait()
    assert list(chain.from_iterable(request.sender.outputs("token_ids"))) == list(range(51))
    assert len(request.sender.sent) <= 3


def test_additional_outputs_are_sent_only_when_they_were_asked_for(frontend: Frontend, engine: FakeEngine) -> None:
    """Triton names every output for a client that named none, so all together are no wish."""
    every_output = tuple(spec.name for spec in OUTPUTS)
    for asking, expected in [
        ({}, {"text_output", "token_ids"}),
        ({"outputs": every_output}, {"text_output", "token_ids"}),
        ({"outputs": ("num_input_tokens",)}, {"text_output", "token_ids", "num_input_tokens"}),
        ({"return_stop_reason": True}, {"text_output", "token_ids", "stop_reason"}),
        ({"return_stop_reason": False}, {"text_output", "token_ids"}),
    ]:
        request_id, request = start_request(frontend, engine, **asking)  # type: ignore[arg-type]
        engine.step(output(request_id, 5))
        engine.step(output(request_id, 6, "LENGTH"))
        request.sender.wait()
        assert [names(response) for response in request.sender.sent] == [expected]


def names(response: Any) -> set[str]:
    return {tensor.name() for tensor in response.tensors}


EVERYTHING = {name: True for name in RETURN_INPUTS}


def token(request_id: str, index: int, token_id: int, reason: str = "NONE", **fields: Any) -> Any:
    return output(
        request_id, token_id, reason, sequence_index=index, num_prompt_tokens=3, num_cached_tokens=2, **fields
    )


def test_several_sequences_are_one_response_in_order_of_their_index(frontend: Frontend, engine: FakeEngine) -> None:
    request_id, request = start_request(frontend, engine, parameters={"n": 3}, **EVERYTHING)
    logprob: dict[str, Any] = {"logprob": -0.5, "rank": 2}
    engine.step(*(token(request_id, index, 10 + index, **logprob) for index in (2, 0, 1)))
    engine.step(token(request_id, 1, 21, "STOP", stop_token_id=21, **logprob))
    engine.step(token(request_id, 2, 22, **logprob), token(request_id, 0, 20, "LENGTH", **logprob))
    engine.step(token(request_id, 2, 32, "LENGTH", **logprob))
    request.sender.wait()
    assert request.sender.num_finals == len(request.sender.sent) == 1
    values = {spec.name: request.sender.outputs(spec.name)[0] for spec in OUTPUTS}
    logprobs = [json.loads(text) for text in values.pop("logprobs")]
    assert [[list(position) for position in sequence] for sequence in logprobs] == [
        [["10"], ["20"]],
        [["11"], ["21"]],
        [["12"], ["22"], ["32"]],
    ]
    assert logprobs[0][0] == {"10": {"logprob": -0.5, "rank": 2, "decoded_token": ""}}
    times = [values.pop(name) for name in RETURN_INPUTS["return_perf_metrics"]]
    assert [len(each) for each in times] == [3] * 4
    assert all(arrival < first <= last for arrival, _, first, last in zip(*times, strict=True))
    assert values == {
        "text_output": ["", "", ""],
        "token_ids": [10, 20, 11, 21, 12, 22, 32],
        "sequence_index": [0, 1, 2],
        "finish_reason": ["length", "stop", "length"],
        "stop_reason": ["null", "21", "null"],
        "cumulative_logprob": [-1.0, -1.0, -1.5],
        "prompt_logprobs": ["[null]"],
        "num_input_tokens": [3],
        "num_output_tokens": [2, 2, 3],
        "num_cached_tokens": [2],
    }


def test_several_streams_have_one_sequence_a_response_and_one_final_at_the_end_of_the_last(
    frontend: Frontend, engine: FakeEngine
) -> None:
    request_id, request = start_request(
        frontend, engine, parameters={"n": 2}, stream=True, return_finish_reason=True, return_num_output_tokens=True
    )
    for number, outputs in enumerate(
        [
            [token(request_id, 0, 5), token(request_id, 1, 6)],
            [token(request_id, 1, 7, "STOP"), token(request_id, 0, 8)],
            [token(request_id, 0, 9, "LENGTH")],
        ]
    ):
        engine.step(*outputs)
        wait_until(lambda number=number: len(request.sender.sent) == [2, 4, 5][number], 5, "sent")  # type: ignore[misc]
    assert request.sender.outputs("sequence_index") == [[0], [1], [1], [0], [0]]
    assert request.sender.outputs("token_ids") == [[5], [6], [7], [8], [9]]
    assert request.sender.outputs("num_output_tokens") == [[1]] * 5
    assert request.sender.outputs("finish_reason") == [["None"], ["None"], ["stop"], ["None"], ["length"]]
    assert request.sender.num_finals == 1


def test_prompt_logprobs_are_sent_once(frontend: Frontend, engine: FakeEngine) -> None:
    sent = Request(input_ids=[1, 2], stream=True, return_prompt_logprobs=True)
    frontend.accept([sent])
    added = engine.next_request()
    assert added.sampling_params.prompt_logprobs == 0
    arrays = [np.array([[2]], np.int32), np.array([[-np.inf]], np.float32), np.array([[7]], np.int32)]
    result = prompt_logprobs_of(added.request_id, *arrays)
    engine.step(output(added.request_id, 5), results=[result])
    wait_until(lambda: len(sent.sender.sent) == 1, 5, "first response")
    engine.step(output(added.request_id, 6, "LENGTH"))
    sent.sender.wait()
    (prompt_logprobs,) = sent.sender.outputs("prompt_logprobs")
    expected = [None, {"2": {"logprob": -9999.0, "rank": 7, "decoded_token": ""}}]
    assert [json.loads(text) for text in prompt_logprobs] == [expected]


def test_an_embedding_is_json_in_the_text(frontend: Frontend, engine: FakeEngine) -> None:
    content = {"input": [1, 2], "pooling_params": {"dimensions": [2]}}
    request = Request(embedding_request=json.dumps(content), return_num_input_tokens=True)
    frontend.accept([request])
    added = engine.next_request()
    assert added.embedding == EmbeddingParams(2)
    values = np.array([3, 4, 12, 0, 0, 0, 0, 0], np.float32).tobytes()
    engine.step(
        output(added.request_id, -1, "STOP", num_prompt_tokens=2), results=[Embedding(added.request_id, values)]
    )
    request.sender.wait()
    ((text,),) = request.sender.outputs("text_output")
    assert json.loads(text) == pytest.approx([0.6, 0.8])
    assert request.sender.outputs("num_input_tokens") == [[2]]
    assert request.sender.num_finals == len(request.sender.sent) == 1


@pytest.mark.parametrize(
    ("inputs", "fields", "message"),
    [
        ({"text_input": "x"}, {}, "text_input: this model has no tokenizer"),
        ({"input_ids": [1], "stream": True}, {"beam_width": 2}, "beam_width is 2: must be 1 when stream is true"),
        ({"input_ids": [1]}, {"n": 65}, "n is 65: must be at most 64 (max_n)"),
        ({"input_ids": [1]}, {"lora_name": "x"}, "lora_name is 'x': must be left out"),
        ({"embedding_request": '{"input": [1]}'}, {"top_k": 2}, "top_k is set: an embedding request can have only"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    frontend: Frontend, engine: FakeEngine, inputs: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    request = Request(**inputs, parameters=fields)
    frontend.accept([request])
    assert_failed(request, TritonError.INVALID_ARG, f"INVALID_ARG: {message}")
    assert_served(frontend, engine)


def test_two_requests_with_the_same_client_id_do_not_mix(frontend: Frontend, engine: FakeEngine) -> None:
    (first_id, first), (second_id, second) = (start_request(frontend, engine, request_id="same") for _ in range(2))
    engine.step(output(first_id, 5, "LENGTH"), output(second_id, 6, "LENGTH"))
    for request, token_id in ((first, 5), (second, 6)):
        request.sender.wait()
        assert request.sender.outputs("token_ids") == [[token_id]]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_cancel_is_answered_within_100_ms(frontend: Frontend, engine: FakeEngine, num_steps: int) -> None:
    """0 steps: the request waits in the engine's queue; 1: it runs."""
    request_id, request = start_request(frontend, engine, stream=True)
    for _ in range(num_steps):
        engine.step(output(request_id, 5))
    wait_until(lambda: len(request.sender.sent) == num_steps, 10, "first response")
    request.sender.cancelled = True
    started_s = time.monotonic()
    assert_failed(request, TritonError.CANCELLED, "CANCELLED: ")
    assert time.monotonic() - started_s < CANCEL_LIMIT_S + SLACK_S
    wait_until(lambda: engine.aborted == [request_id], 5, "the engine is told")


def test_cancel_is_seen_while_the_prompt_waits_to_be_tokenized(
    frontend: Frontend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, entered = threading.Event(), threading.Event()
    process = frontend._input_processor.process

    def slow_process(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        assert may_go_on.wait(10)
        return process(*args, **kwargs)

    monkeypatch.setattr(frontend._input_processor, "process", slow_process)
    in_work, behind = Request(input_ids=[1]), Request(input_ids=[1])
    frontend.accept([in_work, behind])
    assert entered.wait(10)
    for request in (in_work, behind):
        request.sender.cancelled = True
        assert_failed(request, TritonError.CANCELLED)
    may_go_on.set()
    monkeypatch.undo()
    assert_served(frontend, _only_request_is_aborted(engine))


def _only_request_is_aborted(engine: FakeEngine) -> FakeEngine:
    """The one that was in work reaches the engine late and is aborted there; the one behind it never does."""
    late = engine.next_request().request_id
    wait_until(lambda: late in engine.aborted, 5, "the late request is aborted")
    return engine


def test_timeout_parameter_is_a_deadline_in_microseconds(frontend: Frontend, engine: FakeEngine) -> None:
    started_s = time.monotonic()
    _, request = start_request(frontend, engine, parameters={"timeout": 200_000})
    assert_failed(request, TritonError.CANCELLED, "timeout of 0.2 s")
    assert 0.2 <= time.monotonic() - started_s < 0.2 + CANCEL_LIMIT_S + SLACK_S


def test_engine_death_answers_all_and_a_new_engine_serves(
    frontend: Frontend, engine: FakeEngine, engines: Engines
) -> None:
    running = [start_request(frontend, engine, stream=True)[1] for _ in range(8)]
    engines.may_start.clear()
    engine.die()
    for request in running:
        assert_failed(request, TritonError.INTERNAL, "INTERNAL: ")
    assert not frontend.is_available()
    during = Request(input_ids=[1])
    frontend.accept([during])
    assert_failed(during, TritonError.UNAVAILABLE, "UNAVAILABLE: the engine is restarting")
    engines.may_start.set()
    new_engine = engines.next()
    assert engine.is_closed
    wait_until(frontend.is_available, 10, "available again")
    assert_served(frontend, new_engine)


def test_a_dead_engine_that_nobody_noticed_yet_is_unavailable(
    frontend: Frontend, engine: FakeEngine, engines: Engines
) -> None:
    engines.may_start.clear()
    engine._is_dead.set()
    request = Request(input_ids=[1])
    frontend.accept([request])
    assert_failed(request, TritonError.UNAVAILABLE)
    engines.may_start.set()


def test_too_many_deaths_end_in_unavailable_and_give_up(engines: Engines) -> None:
    with running_frontend(engines, max_engine_restarts=2) as frontend:
        for _ in range(3):
            wait_until(frontend.is_available, 10, "available")
            engine = engines.next()
            _, request = start_request(frontend, engine)
            engine.die()
            assert_failed(request, TritonError.INTERNAL)
        assert engines.gave_up.wait(10)
        request = Request(input_ids=[1])
        frontend.accept([request])
        assert_failed(request, TritonError.UNAVAILABLE, "failed too often")


def test_an_engine_that_does_not_start_again_counts_as_a_death(engines: Engines) -> None:
    with running_frontend(engines, max_engine_restarts=1):
        engines.start_error = EngineError("no memory")
        engines.next().die()
        assert engines.gave_up.wait(10)


def test_the_first_engine_must_start(engines: Engines) -> None:
    engines.start_error = ConfigError("model is 'nowhere': no such folder")
    with pytest.raises(ConfigError, match="no such folder"), running_frontend(engines):
        pass


def test_an_error_while_answering_one_request_is_that_requests_alone(
    frontend: Frontend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad_id, bad = start_request(frontend, engine, request_id="bad")
    good_id, good = start_request(frontend, engine)
    processor = frontend._responder._output_processor
    process = processor.process

    def failing(outputs: list[Any], results: list[Any]) -> Any:
        if outputs[0].request_id == bad_id:
            raise KeyError("/secret/path")
        return process(outputs, results)

    monkeypatch.setattr(processor, "process", failing)
    with caplog.at_level(logging.ERROR):
        engine.step(output(bad_id, 5), output(good_id, 6, "LENGTH"))
        assert_failed(bad, TritonError.INTERNAL, "INTERNAL: ", bad_id)
    assert bad.sender.error is not None and "secret" not in bad.sender.error.message
    assert any(bad_id in record.getMessage() and record.exc_info for record in caplog.records)
    good.sender.wait()
    assert good.sender.outputs("token_ids") == [[6]]


def test_a_sender_that_fails_hurts_nobody_else(frontend: Frontend, engine: FakeEngine) -> None:
    gone_id, gone = start_request(frontend, engine, stream=True)
    other_id, other = start_request(frontend, engine, stream=True)
    gone.sender.fail_with = RuntimeError("client is gone")
    engine.step(output(gone_id, 5), output(other_id, 5))
    engine.step(output(other_id, 6, "LENGTH"))
    other.sender.wait()
    assert list(chain.from_iterable(other.sender.outputs("token_ids"))) == [5, 6]
    gone.sender.wait()
    wait_until(lambda: engine.aborted == [gone_id], 5, "the engine is told")


def test_a_request_that_cannot_be_read_is_answered_without_its_exception(
    frontend: Frontend, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = Request(request_id="x\ny", input_ids=[1]), Request(input_ids=[1])
    broken.inputs = _raise  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        frontend.accept([broken, good])
    assert_failed(broken, TritonError.INTERNAL, r"x\ny")
    assert broken.sender.error is not None and "secret" not in broken.sender.error.message
    engine.step(output(engine.next_request().request_id, 5, "LENGTH"))
    good.sender.wait()
    assert good.sender.error is None


def _raise() -> Any:
    raise OSError("/secret/path")


def test_the_engines_refusal_reaches_its_client(frontend: Frontend, engine: FakeEngine) -> None:
    request_id, request = start_request(frontend, engine)
    engine.refuse(request_id, InvalidRequestError("the prompt has 9 tokens: must have at most 8"))
    assert_failed(request, TritonError.INVALID_ARG, "INVALID_ARG: the prompt has 9 tokens")


def test_outputs_that_nobody_waits_for_are_aborted(frontend: Frontend, engine: FakeEngine) -> None:
    engine.step(output("stranger", 5))
    wait_until(lambda: engine.aborted == ["stranger"], 5, "the engine is told")


def test_close_ends_running_and_queued_requests_with_one_final(engines: Engines) -> None:
    with running_frontend(engines) as frontend:
        engine = engines.next()
        requests = [start_request(frontend, engine, stream=True)[1] for _ in range(4)]
    for request in requests:
        assert_failed(request, TritonError.UNAVAILABLE, "being unloaded")
    assert engine.is_closed


def test_drain_lets_requests_finish_then_ends_the_rest(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_DRAIN_FILE", str(tmp_path / "drain"))
    monkeypatch.setenv("DEEPINFER_DRAIN_TIMEOUT_S", "0.5")
    with running_frontend(engines) as frontend:
        engine = engines.next()
        quick_id, quick = start_request(frontend, engine)
        _, slow = start_request(frontend, engine)
        (tmp_path / "drain").touch()
        wait_until(lambda: not frontend.is_available(), 5, "draining")
        late = Request(input_ids=[1])
        frontend.accept([late])
        assert_failed(late, TritonError.UNAVAILABLE, "shutting down")
        engine.step(output(quick_id, 5, "LENGTH"))
        quick.sender.wait()
        assert quick.sender.error is None
        assert_failed(slow, TritonError.UNAVAILABLE, "shutting down")


def test_metrics_add_up_over_a_restart(frontend: Frontend, engine: FakeEngine, engines: Engines) -> None:
    engine.step(stats=EngineStats(num_generation_tokens=10, num_steps=5))
    wait_until(lambda: sum(MetricFamily.values.get("deepinfer_generation_tokens_total", [])) == 10, 5, "published")
    engine.die()
    engines.next().step(stats=EngineStats(num_generation_tokens=3, num_steps=2))
    wait_until(lambda: sum(MetricFamily.values.get("deepinfer_generation_tokens_total", [])) == 13, 5, "published")
