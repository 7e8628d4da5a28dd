"""Requests of every kind get the very same answers with drafts as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.outputs import CompletionSequence

TEXT = """Say this again, word for word, three times: The red fox runs over the green hill, and the green hill is under
the red fox. The red fox runs over the green hill, and the green hill is under the red fox. The red fox"""

_LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "ngram, 1": lambda: {**_LOOKUP, "num_speculative_tokens": 1},
    "ngram, 5": lambda: {**_LOOKUP, "num_speculative_tokens": 5},
    "the model itself, 3": lambda: {
        "method": "draft_model",
        "model": str(resolve_model(None)),
        "num_speculative_tokens": 3,
    },
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 1},
    "seeded, truncated": {"temperature": 0.7, "seed": 2, "top_k": 20, "top_p": 0.8},
    "several": {"temperature": 0.8, "seed": 3, "n": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "biased, some banned": {"temperature": 0, "logit_bias": {"365": 2.0}, "bad_words": ["green hill"]},
    "log-probabilities": {"temperature": 0.5, "seed": 4, "logprobs": 3},
    "grammar": {"temperature": 0.6, "seed": 5, "structured_outputs": {"regex": "( (red|green) (fox|hill),){3,20}\\."}},
    "at least": {"temperature": 0, "min_tokens": 30, "stop_token_ids": [28, 30], "ignore_eos": True},
    "stop string": {"temperature": 0, "stop": ["hill is"]},
    "short": {"temperature": 0, "max_tokens": 3},
}


def said(sequence: CompletionSequence) -> tuple[Any, ...]:
    """All but when."""
    return (
        sequence.text,
        sequence.token_ids,
        sequence.finish_reason,
        sequence.stop_reason,
        sequence.cumulative_logprob,
        sequence.logprobs,
    )


def answers(*, zero_overhead_scheduling: bool, **engine_args: Any) -> tuple[dict[str, list[CompletionSequence]], int]:
    """→ (of each request its sequences, how many drafts became tokens)."""
    with LLM(zero_overhead_scheduling=zero_overhead_scheduling, **engine_args) as llm:
        params = [SamplingParams(**{"max_tokens": 60, **fields}) for fields in REQUESTS.values()]
        completions = llm.complete([TEXT] * len(params), params, use_tqdm=False)
        scheduler = llm.llm_engine.scheduler
        assert scheduler.num_free_blocks == scheduler.num_blocks
        assert llm.llm_engine.num_tracked == 0
        sequences = {name: done.sequences for name, done in zip(REQUESTS, completions, strict=True)}
        return sequences, scheduler.num_accepted_draft_tokens


@pytest.fixture(scope="module")
def without_drafts() -> dict[str, list[CompletionSequence]]:
    return answers(zero_overhead_scheduling=True)[0]


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_of_every_kind_get_the_same_answers(
    without_drafts: dict[str, list[CompletionSequence]], drafter: str, zero_overhead_scheduling: bool
) -> None:
    with_drafts, num_accepted = answers(
        zero_overhead_scheduling=zero_overhead_scheduling, speculative_config=DRAFTERS[drafter]()
    )
    assert num_accepted > 100
    for name, expected in without_drafts.items():
        for ours, theirs in zip(with_drafts[name], expected, strict=True):
            assert (name, said(ours)) == (name, said(theirs))
