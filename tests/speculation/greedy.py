"""Greedy requests of many lengths, transformers' answers, and whether ours are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.test_same_tokens import BATCHING, Case, blocks_for_the_longest, run

WAYS = [
    ("defaults", 1, 64),
    ("one at a time", 2, 24),
    ("tiny prefill budget", 3, 32),
    ("large prefill budget", 4, 1),
    ("no prefix cache", 5, 24),
    ("few blocks", 6, 24),
    ("small blocks", 7, 48),
    ("defaults", 8, 2),
    ("few blocks", 2, 64),
    ("small blocks", 8, 64),
]
"""Of BATCHING; num_speculative_tokens; sequences at once."""


@dataclass(frozen=True)
class GreedyCases:
    """A random model's folder, and for each of 64 cases the new tokens."""

    path: Path
    cases: list[Case]
    expected: list[list[int]]

    def check(self, batching: str, num_seqs: int, **engine_args: Any) -> None:
        cases = self.cases[:num_seqs]
        engine_args = {**BATCHING[batching], **engine_args}
        if batching == "few blocks":
            engine_args["num_gpu_blocks_override"] = blocks_for_the_longest(cases)
        tokens, num_preemptions = run(self.path, cases, **engine_args)
        assert tokens == self.expected[:num_seqs]
        assert (num_preemptions > 0) == (batching == "few blocks")
