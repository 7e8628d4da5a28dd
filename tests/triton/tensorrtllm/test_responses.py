"""Answers of tensorrt_llm and tensorrt_llm_bls: their tensors, whole characters at a time, with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.outputs import RequestTimes, TextDelta, TokenLogprob
from tests.support import fake_triton
from tests.support.fake_engine import FakeEngine, output
from tests.support.fake_triton import Request, TritonError
from tests.support.tokenizers import bundled_tokenizer
from tests.support.triton_server import wait_until

from deepinfer_backend.triton.frontend import Frontend  # isort: skip (after fake_triton)
from deepinfer_backend.triton.tensorrtllm.model import TensorrtLlmBlsModel, TensorrtLlmModel  # isort: skip
from deepinfer_backend.triton.tensorrtllm.responses import TextResponses, TokenResponses, Wanted  # isort: skip

assert fake_triton

VOCAB_SIZE = 49_152
NOTHING = Wanted(log_probs=False, perf_metrics=False, num_input_tokens=False, num_output_tokens=False, block_size=4)
EVERYTHING = Wanted(log_probs=True, perf_metrics=True, num_input_tokens=True, num_output_tokens=True, block_size=4)
NO_PROMPT = np.empty(0, np.int32)


def values_of(tensors: list[Any]) -> dict[str, Any]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in tensors}


def delta(index: int = 0, **fields: Any) -> TextDelta:
    return TextDelta(sequence_index=index, **fields)


def logprobs(*values: float) -> list[list[TokenLogprob]]:
    return [[TokenLogprob(5, value, 1), TokenLogprob(6, -9.0, 2)] for value in values]


def test_the_prompt_stands_in_front_of_each_sequence_and_the_shorter_ones_are_filled_up() -> None:
    build = TokenResponses(NOTHING, np.array([1, 2], np.int32))
    tensors = build([delta(0, token_ids=[7], text="a"), delta(1, token_ids=[8, 9, 10], text="bcd")])
    assert values_of(tensors) == {
        "output_ids": [[[1, 2, 7, -1, -1], [1, 2, 8, 9, 10]]],
        "sequence_length": [[3, 5]],
        "text_output": [b"a", b"bcd"],
        "batch_index": [[0]],
        "sequence_index": [[0, 1]],
    }
    assert {tensor.name(): tensor.as_numpy().dtype for tensor in tensors} == {
        "output_ids": np.int32,
        "sequence_length": np.int32,
        "text_output": np.object_,
        "batch_index": np.int32,
        "sequence_index": np.int32,
    }


@pytest.mark.parametrize("build", [TokenResponses(EVERYTHING, NO_PROMPT), TextResponses(EVERYTHING)])
def test_what_was_asked_for_is_told(build: Any) -> None:
    first = delta(
        token_ids=[7, 8],
        num_prompt_tokens=9,
        num_cached_tokens=8,
        num_output_tokens=2,
        cumulative_logprob=-1.5,
        logprobs=logprobs(-0.5, -1.0),
        times=RequestTimes(1, 3, 5, 7),
    )
    second = delta(
        1,
        token_ids=[9],
        num_prompt_tokens=9,
        num_cached_tokens=8,
        num_output_tokens=4,
        cumulative_logprob=-0.25,
        logprobs=logprobs(-0.25),
        times=RequestTimes(1, 2, 6, 9),
    )
    values = values_of(build([first, second]))
    expected = {
        "cum_log_probs": [[-1.5, -0.25]],
        "output_log_probs": [[[-0.5, -1.0], [-0.25, 0.0]]],
        "num_input_tokens": [[9]],
        "num_output_tokens": [[2, 1]],
        # Blocks of 4: the 9 tokens of the prompt fill two, which both share; one has 11 tokens, the other 13.
        "kv_cache_alloc_total_blocks": [[2 + 1 + 2]],
        "kv_cache_reused_blocks": [[2]],
        "kv_cache_alloc_new_blocks": [[3]],
        "arrival_time_ns": [[1]],
        "first_scheduled_time_ns": [[2]],
        "first_token_time_ns": [[5]],
        "last_token_time_ns": [[9]],
        "acceptance_rate": [[0.0]],
        "total_accepted_draft_tokens": [[0]],
        "total_draft_tokens": [[0]],
    }
    assert {name: values[name] for name in expected} == expected


def test_a_token_that_ends_the_sequence_is_not_part_of_it() -> None:
    ended = delta(token_ids=[7, 2], text="a", stop_reason=2, finish_reason="stop", logprobs=logprobs(-0.5, -1.0))
    values = values_of(TokenResponses(EVERYTHING, NO_PROMPT)([ended]))
    assert (values["output_ids"], values["sequence_length"]) == ([[[7]]], [[1]])
    assert (values["output_log_probs"], values["num_output_tokens"]) == ([[[-0.5]]], [[1]])


def test_tokens_without_text_yet_wait_for_the_sequences_next_response() -> None:
    build = TokenResponses(EVERYTHING, NO_PROMPT)
    deltas = [
        delta(0, token_ids=[7, 8], num_held_tokens=1, logprobs=logprobs(-1, -2)),
        delta(1, token_ids=[17], num_held_tokens=1, logprobs=logprobs(-3)),
        delta(0, token_ids=[9], num_held_tokens=2, logprobs=logprobs(-4)),
        delta(0, token_ids=[10], logprobs=logprobs(-5)),
        delta(1, token_ids=[18], finish_reason="length", logprobs=logprobs(-6)),
    ]
    told = [values_of(build([each])) for each in deltas]
    assert [values["output_ids"] for values in told] == [[[[7]]], [[[]]], [[[]]], [[[8, 9, 10]]], [[[17, 18]]]]
    assert [values["sequence_length"] for values in told] == [[[1]], [[0]], [[0]], [[3]], [[2]]]
    assert [values["output_log_probs"][0][0] for values in told] == [[-1], [], [], [-2, -4, -5], [-3, -6]]


@contextmanager
def running_frontend(model: Any, **model_config: Any) -> Iterator[tuple[Frontend, FakeEngine]]:
    engine = FakeEngine(EngineConfig())
    engine.info = type(engine.info)("/nowhere", 4096, VOCAB_SIZE, 500, 16, "cpu", "float32", config=engine.info.config)
    frontend = Frontend(
        model_name="fake",
        model_version="1",
        start_engine=lambda rank: engine,
        load_tokenizer=lambda info: bundled_tokenizer(),
        give_up=lambda: None,
        interface=model.wire_interface({"model_transaction_policy": {"decoupled": True}, **model_config}),
    )
    try:
        yield frontend, engine
    finally:
        frontend.close()


def token_request(**tensors: Any) -> Request:
    """To tensorrt_llm."""
    return Request(input_ids=np.array([[5, 6]], np.int32), request_output_len=np.array([[64]], np.int32), **tensors)


TRUE = np.array([[True]])


def has_sent(request: Request, num_responses: int) -> bool:
    return len(request.sender.sent) == num_responses


def test_each_response_of_a_stream_decodes_by_itself_to_whole_characters() -> None:
    tokenizer = bundled_tokenizer()
    text = "Grüße 🌍🧪, 你好!"
    token_ids = tokenizer.encode(text)
    with running_frontend(TensorrtLlmModel()) as (frontend, engine):
        request = token_request(streaming=TRUE)
        frontend.accept([request])
        request_id = engine.next_request().request_id
        for num_sent, token_id in enumerate(token_ids[:-1], start=1):
            engine.step(output(request_id, token_id))
            wait_until(partial(has_sent, request, num_sent), 10, "a response for each token")
        engine.step(output(request_id, token_ids[-1], "LENGTH"))
        request.sender.wait()
    pieces = [ids[0][0] for ids in request.sender.outputs("output_ids")]
    assert [token_id for piece in pieces for token_id in piece] == token_ids
    decoded = [tokenizer.decode(piece) for piece in pieces]
    assert "".join(decoded) == text
    assert decoded == [piece for (piece,) in request.sender.outputs("text_output")]
    assert [piece for piece in pieces if not piece], "a character of several tokens has to wait"


def test_a_stop_word_is_cut_off_across_the_borders_of_tokens() -> None:
    tokenizer = bundled_tokenizer()
    token_ids = tokenizer.encode("The sea is calm.\n\nUser: why")
    stop = tokenizer.encode("\n\nUser:")
    with running_frontend(TensorrtLlmModel()) as (frontend, engine):
        stop_words = np.array([[stop, [len(stop)] + [-1] * (len(stop) - 1)]], np.int32)
        request = token_request(streaming=TRUE, stop_words_list=stop_words)
        frontend.accept([request])
        request_id = engine.next_request().request_id
        for token_id in token_ids:
            engine.step(output(request_id, token_id))
        request.sender.wait()
        assert request.sender.error is None
    assert "".join(piece for (piece,) in request.sender.outputs("text_output")) == "The sea is calm."
    assert engine.aborted == [request_id]


def test_beams_have_their_log_probabilities_as_well() -> None:
    with running_frontend(TensorrtLlmModel()) as (frontend, engine):
        beam_width = np.array([[2]], np.int32)
        request = token_request(beam_width=beam_width, return_log_probs=TRUE, exclude_input_in_output=TRUE)
        frontend.accept([request])
        asked = engine.next_request()
        beams = [(7, -0.5, "NONE", 0), (8, -0.25, "LENGTH", 0), (9, -1.0, "LENGTH", 1)]
        engine.step(
            *(
                output(asked.request_id, token_id, reason, logprob=logprob, sequence_index=index)
                for token_id, logprob, reason, index in beams
            )
        )
        request.sender.wait()
        assert request.sender.error is None
    assert request.sender.outputs("output_ids") == [[[[7, 8], [9, -1]]]]
    assert request.sender.outputs("output_log_probs") == [[[[-0.5, -0.25], [-1.0, 0.0]]]]
    assert request.sender.outputs("cum_log_probs") == [[[-0.75, -1.0]]]


def test_stop_ends_the_running_request_of_that_id_and_is_answered() -> None:
    with running_frontend(TensorrtLlmModel()) as (frontend, engine):
        running, other = token_request(request_id="mine"), token_request(request_id="other")
        frontend.accept([running, other])
        request_id, other_id = engine.next_request().request_id, engine.next_request().request_id
        stop = Request(request_id="mine", stop=TRUE)
        frontend.accept([stop])
        running.sender.wait()
        stop.sender.wait()
        assert (running.sender.error is not None) and running.sender.error.code == TritonError.CANCELLED
        assert stop.sender.error is None
        assert engine.aborted == [request_id]
        engine.step(output(other_id, 7, "LENGTH"))
        other.sender.wait()
        assert other.sender.error is None


def test_a_text_request_is_answered_with_the_prompt_in_front() -> None:
    tokenizer = bundled_tokenizer()
    with running_frontend(TensorrtLlmBlsModel()) as (frontend, engine):
        text = np.array([[b"The sea"]], np.object_)
        request = Request(text_input=text, max_tokens=np.array([[8]], np.int32), return_num_input_tokens=TRUE)
        frontend.accept([request])
        asked = engine.next_request()
        assert asked.prompt_token_ids.tolist() == tokenizer("The sea")["input_ids"]
        for token_id in tokenizer.encode(" is calm"):
            engine.step(output(asked.request_id, token_id))
        engine.step(output(asked.request_id, tokenizer.eos_token_id, "STOP", stop_token_id=tokenizer.eos_token_id))
        request.sender.wait()
    (response,) = request.sender.sent
    assert response is not None
    assert values_of(response.tensors) == {
        "text_output": [b"The sea is calm"],
        "batch_index": [[0]],
        "sequence_index": [[0]],
        "num_input_tokens": [[1]],
    }


def test_the_config_of_a_model_says_what_a_request_means_that_does_not_exclude_its_input() -> None:
    parameters = {"exclude_input_in_output": {"string_value": "True"}}
    with running_frontend(TensorrtLlmModel(), parameters=parameters) as (frontend, engine):
        request = token_request()
        frontend.accept([request])
        engine.step(output(engine.next_request().request_id, 7, "LENGTH"))
        request.sender.wait()
    assert request.sender.outputs("output_ids") == [[[[7]]]]


class _Config:
    """Triton's ModelConfig as far as it is used; records what is set."""

    def __init__(self, **fields: Any) -> None:
        self._fields = {"max_batch_size": 0, "input": [], "output": [], **fields}
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def as_dict(self) -> dict[str, Any]:
        return self._fields

    def set_max_batch_size(self, size: int) -> None:
        self._fields["max_batch_size"] = size

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self._fields["model_transaction_policy"] = policy

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.inputs[tensor["name"]] = tensor

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.outputs[tensor["name"]] = tensor


def test_a_config_is_completed_with_this_models_tensors_and_a_batch_dimension() -> None:
    config = _Config(input=[{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}])
    TensorrtLlmBlsModel.auto_complete_config(config)
    completed = config.as_dict()
    assert completed["max_batch_size"] > 0
    assert completed["model_transaction_policy"] == {"decoupled": True}
    assert "text_input" not in config.inputs
    assert config.inputs["max_tokens"] == {
        "name": "max_tokens",
        "data_type": "TYPE_INT32",
        "dims": [1],
        "optional": False,
    }
    assert config.outputs["output_log_probs"]["dims"] == [-1, -1]


def test_a_config_that_is_not_decoupled_or_has_rows_stays_so() -> None:
    config = _Config(max_batch_size=8, model_transaction_policy={"decoupled": False})
    TensorrtLlmModel.auto_complete_config(config)
    assert config.as_dict()["max_batch_size"] == 8
    assert config.as_dict()["model_transaction_policy"] == {"decoupled": False}
    with pytest.raises(ValueError, match="unknown input 'text_input'"):
        TensorrtLlmModel.auto_complete_config(_Config(input=[{"name": "text_input", "data_type": "TYPE_STRING"}]))
