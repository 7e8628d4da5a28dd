"""Engines take turns, and one that does not run here is left out with a reason."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.measure import Field, Plan, interleaved
from benchmarks.step_cost import ModelShape
from tests.benchmarks.test_engine_process import fake_engine
from tests.benchmarks.test_results import make_results

SHAPE = ModelShape(2, 64, 96, 4, 4, 16, 100)


def test_each_round_has_every_engine_once_and_another_first() -> None:
    rounds = list(interleaved(["a", "b", "c"], 4))
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_a_failing_engine_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    results = make_results()
    bandwidths = itertools.count(1e9, 1e9)  # another one each round
    said: list[str] = []
    with Field(SHAPE, 2, tmp_path, results, said.append) as field:
        for engine in (
            fake_engine("quick", step_s=0.1),
            fake_engine("absent", missing="make peers PEERS=absent"),
            fake_engine("broken", fault="load"),
            fake_engine("mortal", fault="death"),
            fake_engine("slow", step_s=0.2),
        ):
            field.start(engine)
        field.measure_rows(Plan([1, 2], num_rounds=3, prompt_len=4, max_tokens=8), bandwidths.__next__)
    assert results.missing["absent bf16"] == "not installed: make peers PEERS=absent"
    assert "no such model" in results.missing["broken bf16"]
    assert "its process ended" in results.missing["mortal bf16"]
    assert [(row.engine, row.concurrency, len(row.runs)) for row in results.rows] == [
        ("quick bf16", 1, 3),
        ("slow bf16", 1, 3),
        ("quick bf16", 2, 3),
        ("slow bf16", 2, 3),
    ]
    assert results.rows[2].bandwidths == [4e9, 5e9, 6e9]
    assert results.rows[2].speedup_over(results.rows[3]) == pytest.approx(2.0)
    assert [facts.name for facts in results.engines] == ["quick bf16", "mortal bf16", "slow bf16"]
    rounds = [line.rpartition(": ")[2].partition(" ")[0] for line in said if line.startswith("2 streams")]
    assert rounds == ["quick", "slow", "slow", "quick", "quick", "slow"]
