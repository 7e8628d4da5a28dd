"""Tokens become deltas: of several sequences, with log-probabilities, and cut where each sequence is told to stop."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.engine.messages import Embedding, EmbeddingParams, EngineRequest
from deepinfer_backend.engine.output_processor import OutputProcessor
from deepinfer_backend.outputs import TextDelta
from deepinfer_backend.sampling_params import SamplingParams
from tests.support.fake_engine import output, prompt_logprobs_of
from tests.support.tokenizers import bundled_tokenizer

ARRIVAL_NS = 7


def encode(text: str) -> list[int]:
    token_ids: list[int] = bundled_tokenizer().encode(text)
    return token_ids


PROMPT_IDS = [504, 1837, 314]
WORDS = encode(" one two three four")
END = 2  # <|im_end|>


class Run:
    """One request in an output processor of its own."""

    def __init__(
        self, *, tokenizer: Any = ..., prompt: list[int] = PROMPT_IDS, embedding: Any = None, **fields: Any
    ) -> None:
        self.processor = OutputProcessor(bundled_tokenizer() if tokenizer is ... else tokenizer)
        request = EngineRequest("id", np.array(prompt, np.int32), SamplingParams(**fields), embedding=embedding)
        self.processor.add_request(request, ARRIVAL_NS)
        self.deltas: list[TextDelta] = []
        self.aborted: list[Any] = []

    def step(self, *outputs: Any, results: Any = ()) -> list[TextDelta]:
        processed = self.processor.process(outputs, results)
        self.aborted += processed.request_ids_to_abort + processed.sequences_to_abort
        deltas = [delta for _, delta in processed.deltas]
        self.deltas += deltas
        return deltas

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.sequence_index == index)


def token(token_id: int, index: int = 0, reason: str = "NONE", **fields: Any) -> Any:
    return output("id", token_id, reason, sequence_index=index, **fields)


def test_a_request_ends_with_the_last_of_its_sequences() -> None:
    run = Run(n=3)
    run.step(*(token(WORDS[0], index) for index in range(3)))
    run.step(token(WORDS[1], 1, "LENGTH"), token(WORDS[1], 0))
    run.step(token(WORDS[2], 0, "LENGTH"))
    run.step(token(WORDS[3], 2, "STOP"))
    assert [(delta.sequence_index, delta.ends_request) for delta in run.deltas if delta.finish_reason] == [
        (1, False),
        (0, False),
        (2, True),
    ]
    assert [run.text(index) for index in range(3)] == [" one two three", " one two", " one four"]
    assert run.step(token(WORDS[0], 0)) == [], "forgotten"


def test_the_delta_that_ends_a_request_is_its_last() -> None:
    run = Run(n=2)
    run.step(token(WORDS[0], 1), token(WORDS[0], 0), token(WORDS[1], 0, "LENGTH"), token(WORDS[1], 1, "LENGTH"))
    assert [(delta.sequence_index, delta.ends_request) for delta in run.deltas] == [(0, False), (1, True)]


def test_a_stop_string_ends_its_sequence_only() -> None:
    run = Run(n=2, stop=["two"])
    run.step(token(WORDS[0], 0), token(WORDS[0], 1))
    first, second = run.step(token(WORDS[1], 0), token(WORDS[2], 1))
    assert (first.finish_reason, first.stop_reason, first.ends_request) == ("stop", "two", False)
    assert second.finish_reason is None
    assert run.aborted == [("id", 0)]
    assert run.step(token(WORDS[2], 0)) == [], "what the engine had in flight"
    run.step(token(WORDS[1], 1))
    assert run.aborted == [("id", 0), "id"], "the request as a whole, with its last sequence"
    assert (run.text(0), run.text(1)) == (" one ", " one three ")
    assert run.deltas[-1].ends_request


@pytest.mark.parametrize(("include", "text"), [(False, " one tw"), (True, " one two t")])
def test_a_stop_string_is_cut_or_left_in(include: bool, text: str) -> None:
    run = Run(stop=["o t"], include_stop_str_in_output=include)
    for token_id in WORDS:
        run.step(token(token_id))
    assert run.text() == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, " one"),
        ({"include_stop_str_in_output": True}, " one"),
        ({"skip_special_tokens": False}, " one"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, " one<|im_end|>"),
    ],
)
def test_the_token_that_ended_it_is_shown_when_both_its_kinds_are(fields: dict[str, Any], text: str) -> None:
    run = Run(**fields)
    run.step(token(WORDS[0]))
    (delta,) = run.step(token(END, reason="STOP", stop_token_id=END))
    assert run.text() == text
    assert (delta.token_ids, delta.stop_reason) == ([END], END)


def test_a_token_that_a_sampled_text_merely_contains_is_skipped_or_shown() -> None:
    for skip, text in ((True, " one two"), (False, " one<|im_end|> two")):
        run = Run(skip_special_tokens=skip)
        run.step(token(WORDS[0]), token(END), token(WORDS[1], reason="LENGTH"))
        assert run.text() == text


def test_a_delta_tells_how_many_tokens_have_no_text_yet() -> None:
    run = Run(n=2)
    globe = encode("🌍")
    assert len(globe) == 3
    numbers = [[delta.num_held_tokens for delta in run.step(token(id_), token(WORDS[0], 1))] for id_ in globe]
    assert numbers == [[1, 0], [2, 0], [0, 0]]
    run.step(token(globe[0]))
    assert [delta.num_held_tokens for delta in run.step(token(globe[1], reason="LENGTH"))] == [0]


def test_without_detokenizing_there_are_tokens_and_no_text() -> None:
    for tokenizer in (bundled_tokenizer(), None):
        run = Run(tokenizer=tokenizer, detokenize=False, logprobs=0)
        run.step(token(WORDS[0], logprob=-1.0, rank=2), token(WORDS[1], reason="LENGTH", logprob=-2.0, rank=1))
        (delta,) = run.deltas
        assert (delta.text, delta.token_ids) == ("", WORDS[:2])
        assert delta.logprobs is not None
        assert [position[0].decoded_token for position in delta.logprobs] == ["", ""]


def test_each_token_has_its_logprobs_also_where_a_stop_string_cut_its_text() -> None:
    run = Run(logprobs=1, stop=["two three"])
    for number, token_id in enumerate(WORDS[:3], start=1):
        run.step(token(token_id, logprob=-float(number), rank=number, top_logprobs=[(WORDS[0], -1.0)]))
    token_ids = [token_id for delta in run.deltas for token_id in delta.token_ids]
    logprobs = [position for delta in run.deltas for position in delta.logprobs or []]
    assert run.text() == " one "
    assert token_ids == WORDS[:3]
    assert [(each[0].token_id, each[0].logprob, each[0].rank, each[0].decoded_token) for each in logprobs] == [
        (WORDS[0], -1.0, 1, " one"),
        (WORDS[1], -2.0, 2, " two"),
        (WORDS[2], -3.0, 3, " three"),
    ]
    assert [[(best.token_id, best.rank) for best in position[1:]] for position in logprobs] == [[(WORDS[0], 1)]] * 3
    assert [delta.cumulative_logprob for delta in run.deltas] == [-1.0, -3.0, -6.0]
    assert [delta.num_output_tokens for delta in run.deltas] == [1, 2, 3]


def test_no_logprob_is_infinite_or_no_number() -> None:
    run = Run(logprobs=2)
    run.step(token(WORDS[0], logprob=-math.inf, rank=9, top_logprobs=[(1, -0.5), (3, -math.inf)]))
    run.step(token(WORDS[0], reason="LENGTH", logprob=-math.inf, rank=9, top_logprobs=[(1, math.nan), (3, -1.0)]))
    shown = [entry.logprob for delta in run.deltas for position in delta.logprobs or [] for entry in position]
    assert shown == [-9999.0, -0.5, -9999.0, -9999.0, -9999.0, -1.0]
    json.dumps([shown, run.deltas[-1].cumulative_logprob], allow_nan=False)


def test_a_beams_tokens_have_their_own_logprobs_without_being_asked() -> None:
    run = Run(beam_width=2)
    (delta,) = run.step(token(WORDS[0], logprob=-0.5), token(WORDS[1], reason="LENGTH", logprob=-0.25))
    assert delta.logprobs is not None
    entries = [[(entry.token_id, entry.logprob, entry.rank) for entry in position] for position in delta.logprobs]
    assert entries == [[(WORDS[0], -0.5, 0)], [(WORDS[1], -0.25, 0)]]


def test_without_being_asked_there_are_no_logprobs() -> None:
    run = Run()
    run.step(token(WORDS[0], reason="LENGTH"))
    (delta,) = run.deltas
    assert (delta.logprobs, delta.prompt_logprobs, delta.cumulative_logprob) == (None, None, 0.0)


def test_prompt_logprobs_are_on_the_first_delta_with_nothing_for_the_first_token() -> None:
    run = Run(prompt_logprobs=1, n=2)
    arrays = [
        np.array([[1837, 5], [314, 6]], np.int32),
        np.array([[-1.5, -0.5], [-math.inf, -0.25]], np.float32),
        np.array([[4, 1], [900, 1]], np.int32),
    ]
    run.step(results=[prompt_logprobs_of("id", *arrays)])
    run.step(token(WORDS[0], 1), token(WORDS[0], 0))
    run.step(token(WORDS[1], 0, "LENGTH"))
    first, *others = run.deltas
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [
        [(e.token_id, e.logprob, e.rank) for e in position] for position in first.prompt_logprobs[1:] if position
    ] == [
        [(1837, -1.5, 4), (5, -0.5, 1)],
        [(314, -9999.0, 900), (6, -0.25, 1)],
    ]
    assert [delta.prompt_logprobs for delta in others] == [None, None]


def test_a_prompt_of_one_token_has_no_logprob_to_tell() -> None:
    run = Run(prompt=[5], prompt_logprobs=3)
    run.step(token(WORDS[0], reason="LENGTH"))
    assert run.deltas[0].prompt_logprobs == [None]


@pytest.mark.parametrize(("dimensions", "expected"), [(None, [0.6, 0.0, -0.8, 0.0]), (1, [1.0]), (2, [1.0, 0.0])])
def test_an_embedding_is_its_first_numbers_scaled_to_length_1(dimensions: int | None, expected: list[float]) -> None:
    run = Run(embedding=EmbeddingParams(dimensions))
    values = np.array([3, 0, -4, 0], np.float32)
    (delta,) = run.step(token(5, reason="LENGTH"), results=[Embedding("id", values.tobytes())])
    assert delta.embedding == pytest.approx(expected)
    assert (delta.text, delta.token_ids, delta.num_output_tokens) == ("", [], 0)
    assert (delta.finish_reason, delta.ends_request) == ("stop", True)


def test_an_embedding_of_nothing_is_not_divided_by_zero() -> None:
    run = Run(embedding=EmbeddingParams())
    (delta,) = run.step(token(5, reason="LENGTH"), results=[Embedding("id", np.zeros(3, np.float32).tobytes())])
    assert delta.embedding == [0.0, 0.0, 0.0]


def test_times_are_in_order_and_each_sequences_own() -> None:
    run = Run(n=2)
    before_ns = time.monotonic_ns()
    run.step(token(WORDS[0], 0, first_scheduled_time_ns=9))
    run.step(token(WORDS[1], 0, "LENGTH", first_scheduled_time_ns=9), token(WORDS[0], 1, first_scheduled_time_ns=11))
    first, last, other = (delta.times for delta in run.deltas)
    assert (first.arrival_time_ns, first.first_scheduled_time_ns, other.first_scheduled_time_ns) == (ARRIVAL_NS, 9, 11)
    assert before_ns <= first.first_token_time_ns == first.last_token_time_ns == last.first_token_time_ns
    assert last.first_token_time_ns <= last.last_token_time_ns <= other.first_token_time_ns <= time.monotonic_ns()


def test_deltas_put_together_are_the_delta_of_all_at_once() -> None:
    outputs = [token(id_, logprob=-1.0, rank=1, top_logprobs=[(id_, -1.0)]) for id_ in WORDS[:3]]
    outputs.append(token(WORDS[3], reason="LENGTH", logprob=-1.0, rank=1, top_logprobs=[(5, -1.0)]))
    one_by_one, at_once = Run(logprobs=1), Run(logprobs=1)
    for each in outputs:
        one_by_one.step(each)
    at_once.step(*outputs)
    first, *others = one_by_one.deltas
    for other in others:
        first.append(other)
    (whole,) = at_once.deltas
    first.times = whole.times
    assert first == whole


def test_min_tokens_lets_a_stop_string_pass() -> None:
    run = Run(stop=["two"], min_tokens=2)
    for token_id in [*WORDS[:3], WORDS[1]]:
        run.step(token(token_id))
    assert run.text() == " one two three "
    assert run.aborted == ["id"]


def test_strangers_are_dropped() -> None:
    run = Run()
    assert run.step(output("stranger", 5), results=[Embedding("stranger", b"")]) == []
