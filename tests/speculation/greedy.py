"""Greedy requests of many lengths, transformers' answers, and whether ours are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.test_same_tokens import BATCHING, Case, blocks_for_the_longest, run


@dataclass(frozen=True)
class GreedyCases:
    """A random model's folder, and for each case the new tokens."""

    path: Path
    cases: list[Case]
    expected: list[list[int]]

    def check(self, batching: str, **engine_args: Any) -> None:
        engine_args = {**BATCHING[batching], **engine_args}
        if batching == "few blocks":
            engine_args["num_gpu_blocks_override"] = blocks_for_the_longest(self.cases)
        tokens, num_preemptions = run(self.path, self.cases, **engine_args)
        assert tokens == self.expected
        assert (num_preemptions > 0) == (batching == "few blocks")
