"""Whatever a request asks for, engines and ranks together answer what one engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.outputs import Completion

LAYOUTS: dict[str, dict[str, Any]] = {
    "two engines": {"data_parallel_size": 2},
    "two in lockstep": {"data_parallel_size": 2, "data_parallel_lockstep": True},
    "one prefills, one decodes": {"data_parallel_size": 2, "num_prompt_engines": 1},
    "three ranks of one": {"tensor_parallel_size": 3},
}
SCHEMA = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 8}}, "required": ["colour"]}
WISHES = [
    SamplingParams(seed=3, temperature=0.9, top_p=0.8, max_tokens=20, n=3),
    SamplingParams(seed=4, temperature=1.0, repetition_penalty=1.3, max_tokens=20),
    SamplingParams(temperature=0, logit_bias={7: 3.0}, allowed_token_ids=[5, 6, 7, 8, 9], max_tokens=12),
    SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": "(red|green|blue), [0-9]{3}"}),
    SamplingParams(temperature=0, max_tokens=40, structured_outputs={"json": SCHEMA}),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, stop=[" the"]),
    SamplingParams(temperature=0, max_tokens=12, bad_words=["red"]),
    SamplingParams(beam_width=3, n=2, max_tokens=10),
    SamplingParams(temperature=0, max_tokens=1),
]
PROMPTS = [f"{index}. The colours of the flag of this country are" for index in range(len(WISHES))]


def answers(**engine_args: Any) -> list[Completion]:
    """In float32, of the bundled model: a grammar needs its tokenizer."""
    with LLM(dtype="float32", device="cpu", num_gpu_blocks_override=128, **engine_args) as llm:
        return llm.complete(PROMPTS, WISHES, use_tqdm=False)


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Completion]]:
    yield answers()


@pytest.mark.parametrize(
    ("layout", "zero_overhead_scheduling"),
    [*((layout, True) for layout in LAYOUTS), *((layout, False) for layout in list(LAYOUTS)[2:])],
)
def test_answers_are_those_of_one_engine(
    expected: list[Completion], layout: str, zero_overhead_scheduling: bool
) -> None:
    got = answers(**LAYOUTS[layout], zero_overhead_scheduling=zero_overhead_scheduling)
    assert [shown(each) for each in got] == [shown(each) for each in expected]


def shown(completion: Completion) -> Any:
    """What must be equal: all but the last digits of log-probabilities."""
    sequences = [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, len(each.logprobs or []))
        for each in completion.sequences
    ]
    return sequences, len(completion.prompt_logprobs or [])
