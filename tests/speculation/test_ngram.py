"""N-gram drafts change how fast tokens come, and none of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.speculation.greedy import WAYS, GreedyCases


def ngram(num_speculative_tokens: int) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": num_speculative_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
        }
    }


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize(("batching", "num_speculative_tokens", "num_seqs"), WAYS)
def test_greedy_tokens_equal_transformers(
    random_model: GreedyCases,
    batching: str,
    num_speculative_tokens: int,
    num_seqs: int,
    zero_overhead_scheduling: bool,
) -> None:
    drafter = ngram(num_speculative_tokens)
    random_model.check(batching, num_seqs, zero_overhead_scheduling=zero_overhead_scheduling, **drafter)
