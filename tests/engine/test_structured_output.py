"""Structured output with SmolLM2 at temperature 1: every finished answer has the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jsonschema
import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.outputs import Completion
from tests.support.grammar_cases import grammar_cases, json_schema_cases, regex_cases

NUM_AT_ONCE = 32
FREE_TEXT_EVERY = 8
MAX_TOKENS = 40

Case = tuple[dict[str, Any], Callable[[str], bool]]


def is_full_match(regex: str, text: str) -> bool:
    return re.fullmatch(regex, text) is not None


def is_valid_json(schema: dict[str, Any], text: str) -> bool:
    validator = jsonschema.validators.validator_for(schema)(schema)
    return bool(validator.is_valid(json.loads(text)))


def all_cases() -> list[Case]:
    """(structured_outputs, whether a text is as it asks), of all kinds, mixed."""
    cases: list[Case] = [({"json": schema}, partial(is_valid_json, schema)) for schema in json_schema_cases()]
    cases += [({"regex": regex}, partial(is_full_match, regex)) for regex in regex_cases()]
    cases += [({"grammar": case.grammar}, case.is_valid) for case in grammar_cases()]
    step = 37  # has no common divisor with the number of cases
    return [cases[index * step % len(cases)] for index in range(len(cases))]


def test_every_finished_answer_is_valid_with_32_at_once_next_to_free_text() -> None:
    cases = all_cases()
    assert len(cases) >= 450
    requests: list[tuple[SamplingParams, Callable[[str], bool] | None]] = []
    for index, (spec, check) in enumerate(cases):
        sampling = {"temperature": 1.0, "seed": index, "max_tokens": MAX_TOKENS}
        if index % FREE_TEXT_EVERY == 0:
            requests.append((SamplingParams(**sampling), None))
        requests.append((SamplingParams(**sampling, structured_outputs=spec), check))
    with LLM(max_num_seqs=NUM_AT_ONCE) as llm:
        completions = llm.complete(
            ["Here is one: "] * len(requests), [params for params, _ in requests], use_tqdm=False
        )
        assert llm.llm_engine.num_tracked == 0
    num_finished = 0
    for completion, (_, is_as_asked) in zip(completions, requests, strict=True):
        (sequence,) = completion.sequences
        if is_as_asked is None:
            assert sequence.text
        elif sequence.finish_reason == "stop":
            num_finished += 1
            assert is_as_asked(sequence.text), sequence.text
    # The others ran into max_tokens, which no grammar can keep a model from.
    assert num_finished >= 0.7 * len(cases)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(dtype="float32", grammar_compile_timeout_s=5.0) as llm:
        yield llm


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}])
def test_choice_and_json_object_are_kept_by_n_sequences_with_penalties(llm: LLM, sampling: dict[str, Any]) -> None:
    choices = ["yes", "no", 'it\'s "maybe"', "vielleicht, ja\u2026"]
    common = {**sampling, "n": 4, "seed": 3, "repetition_penalty": 1.2, "logprobs": 1}
    params = [
        SamplingParams(max_tokens=16, structured_outputs={"choice": choices}, **common),
        SamplingParams(max_tokens=200, structured_outputs={"json_object": True}, **common),
    ]
    choice, json_object = llm.complete(["Answer: "] * 2, params, use_tqdm=False)
    assert all(sequence.text in choices for sequence in choice.sequences)
    assert len(json_object.sequences) == 4
    for sequence in json_object.sequences:
        if sequence.finish_reason == "stop":
            assert isinstance(json.loads(sequence.text), dict)


def test_structured_output_is_the_same_with_and_without_zero_overhead_scheduling_and_under_preemption() -> None:
    cases = all_cases()[:24]
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=20, structured_outputs=spec)
        for index, (spec, _) in enumerate(cases)
    ]

    def tokens(**engine_args: Any) -> tuple[list[list[int]], int]:
        with LLM(dtype="float32", max_num_seqs=12, **engine_args) as llm:
            completions: list[Completion] = llm.complete(["One: "] * len(params), params, use_tqdm=False)
            num_preemptions = llm.llm_engine.scheduler.num_preemptions
        return [completion.sequences[0].token_ids for completion in completions], num_preemptions

    expected, _ = tokens()
    assert tokens(zero_overhead_scheduling=False)[0] == expected
    preempted, num_preemptions = tokens(num_gpu_blocks_override=16, block_size=2)
    assert num_preemptions > 0
    assert preempted == expected


def test_what_a_grammar_and_other_fields_rule_out_together_fails_that_request_alone(llm: LLM) -> None:
    impossible = SamplingParams(structured_outputs={"choice": ["yes"]}, allowed_token_ids=[5])
    with pytest.raises(ValueError, match="structured_outputs and allowed_token_ids: together they leave no token"):
        llm.generate(["Answer: "], impossible, use_tqdm=False)
    assert llm.generate(["Answer: "], SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.llm_engine.scheduler.num_free_blocks == llm.llm_engine.scheduler.num_blocks


def test_a_grammar_that_has_no_way_on_says_so(llm: LLM) -> None:
    endless = SamplingParams(structured_outputs={"grammar": 'root ::= "a" more\nmore ::= more "b"'})
    with pytest.raises(ValueError, match="structured_outputs cannot be completed"):
        llm.generate(["Answer: "], endless, use_tqdm=False)


def test_a_wide_repetition_is_no_fault(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": ".{1,300}"}, temperature=1.0, seed=1, max_tokens=8)
    assert llm.generate(["The sea is"], params, use_tqdm=False) != [""]
