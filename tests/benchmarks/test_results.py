"""Ratios and shares follow from the runs, and a file of results is read as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.goals import goals
from benchmarks.growth import PREFIX_RATIO
from benchmarks.limits import Limits
from benchmarks.report import all_tables, markdown_report
from benchmarks.results import Curve, EngineFacts, Machine, Results, Row
from benchmarks.step_cost import Cost
from benchmarks.workload import Figures


def make_results() -> Results:
    return Results(
        machine=Machine("a processor", 2, "AVX512", has_bfloat16=True, memory_bytes=24 << 30),
        date="2026-11-30",
        commit="abc",
        prompt_len=128,
        max_tokens=128,
        limits=Limits(2, 40e9, 80e9, float32=200e9, bfloat16=800e9, int8=1600e9),
    )


def add_engine(
    results: Results, family: str, tokens_per_s: list[float], *, weights: str = "bf16", concurrency: int = 1
) -> Row:
    name = f"{family} {weights}"
    results.engines.append(EngineFacts(name, family, weights, "1.0", start_s=2.0))
    runs = [Figures(100, 100 / rate, [0.1, 0.3], step_s=concurrency / rate) for rate in tokens_per_s]
    cost = Cost(num_bytes=0.4e9, num_operations=0.8e9 * concurrency)
    row = Row(name, concurrency, runs, [80e9] * len(runs), cost, 800e9)
    results.rows.append(row)
    return row


def test_ratios_are_of_runs_side_by_side() -> None:
    results = make_results()
    ours = add_engine(results, "deepinfer", [200.0, 20.0, 220.0])
    peer = add_engine(results, "vllm", [100.0, 10.0, 100.0])
    assert ours.tokens_per_s == 200.0
    assert ours.speedup_over(peer) == 2.0
    assert ours.first_token_s == pytest.approx(0.2)


def test_a_step_is_compared_with_what_memory_gave_in_its_round() -> None:
    row = add_engine(make_results(), "deepinfer", [100.0, 50.0, 25.0])
    steady = Row(row.engine, 1, row.runs, [80e9, 40e9, 20e9], row.decode, row.operations_per_s)
    assert steady.share_of_memory_limit == pytest.approx(0.5)  # 0.4 GB at 80 GB/s are 5 of 10 ms, and so on
    assert row.share_of_limit == pytest.approx((0.005 + 0.001) / 0.02)


def test_goals_take_the_fastest_of_a_peers_ways() -> None:
    results = make_results()
    add_engine(results, "deepinfer", [300.0])
    add_engine(results, "llama.cpp", [100.0])
    add_engine(results, "llama.cpp-server", [150.0])
    results.shares[PREFIX_RATIO.format(1000)] = 0.2
    reached = {goal.what: goal for goal in goals(results)}
    against_llama_cpp = reached["output tokens/s ÷ llama.cpp, its faster of bench and server, bf16, 1 stream"]
    assert against_llama_cpp.reached == 2.0
    assert against_llama_cpp.is_met
    prefix = reached["time to first token with a shared 1,000-token prefix ÷ without"]
    assert prefix.is_met is False
    assert reached["output tokens/s ÷ vLLM, bf16, 1 stream"].is_met is None


def test_peers_are_compared_with_ours_of_the_same_weights() -> None:
    results = make_results()
    add_engine(results, "deepinfer", [100.0])
    add_engine(results, "deepinfer", [300.0], weights="4-bit")
    add_engine(results, "llama.cpp", [200.0], weights="4-bit")
    (table,) = [table for table in all_tables(results) if table.title == "1 stream"]
    ratio = table.headings.index("ours ÷ it")
    assert {row[0]: row[ratio] for row in table.rows} == {
        "deepinfer bf16": "–",
        "deepinfer 4-bit": "–",
        "llama.cpp 4-bit": "1.50",
    }


def test_a_report_says_what_is_missing_in_one_line_each() -> None:
    results = make_results()
    results.missing["vllm bf16"] = "its process ended: log\nIllegal | instruction"
    assert markdown_report(results).count("its process ended: log |") == 1


def test_a_file_of_results_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = make_results()
    add_engine(results, "deepinfer", [100.0, 110.0])
    results.curves.append(Curve("streams", "tokens/s", "deepinfer bf16", [1, 2], [100.0, 190.0], [150.0, 300.0]))
    results.missing["vllm bf16"] = "not installed"
    results.shares[PREFIX_RATIO.format(1000)] = 0.1
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results


def test_every_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[bench]'")
    from benchmarks.plots import draw_all

    results = make_results()
    add_engine(results, "deepinfer", [100.0])
    add_engine(results, "deepinfer", [400.0], concurrency=8)
    results.curves.append(Curve("streams", "tokens/s", "deepinfer bf16", [1, 2], [100.0, 190.0], [150.0, 300.0]))
    files = draw_all(results, tmp_path)
    assert [file.name for file in files] == ["roofline.png", "latency_throughput.png", "streams.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
