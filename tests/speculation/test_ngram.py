"""N-gram drafts change how fast tokens come, and none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_same_tokens import BATCHING, Case, blocks_for_the_longest, random_cases, run
from tests.support.models import make_random_model
from tests.support.oracle import TransformersOracle


def ngram(num_speculative_tokens: int) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": num_speculative_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
        }
    }


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case], list[list[int]]]:
    path = make_random_model("llama", tmp_path_factory.mktemp("models"))
    cases = random_cases(24, 400, 160, seed=3)
    oracle = TransformersOracle(path)
    return path, cases, [oracle.greedy(prompt, limit) for prompt, limit in cases]


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 8])
@pytest.mark.parametrize("batching", BATCHING)
def test_greedy_tokens_equal_transformers(
    random_model: tuple[Path, list[Case], list[list[int]]],
    batching: str,
    num_speculative_tokens: int,
    zero_overhead_scheduling: bool,
) -> None:
    path, cases, expected = random_model
    engine_args = dict(
        BATCHING[batching], zero_overhead_scheduling=zero_overhead_scheduling, **ngram(num_speculative_tokens)
    )
    if batching == "few blocks":
        engine_args["num_gpu_blocks_override"] = blocks_for_the_longest(cases)
    tokens, num_preemptions = run(path, cases, **engine_args)
    assert tokens == expected
    assert (num_preemptions > 0) == (batching == "few blocks")
