"""`make bench`: the machine's limits, then our engine and every peer that is installed, in one run and in turn.

Writes results.json, tables.md and plots into benchmarks/results/.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.engines.catalogue import all_engines
from benchmarks.engines.engine import Engine
from benchmarks.growth import Growth, Sizes
from benchmarks.limits import MemoryReader, measure_limits
from benchmarks.machine import commit, this_machine
from benchmarks.measure import Field, Plan
from benchmarks.model_files import float_folder
from benchmarks.peers import peers_folder
from benchmarks.report import markdown_report, print_report
from benchmarks.results import Results
from benchmarks.step_cost import ModelShape
from benchmarks.step_profile import profile_steps

_RESULTS = Path(__file__).with_name("results")
_REPORT_WIDTH = 100  # headings are cut in less
_SIZES = Sizes(
    context_lens=[256, 512, 1024, 2048, 4096, 8192],
    streams=[1, 2, 4, 8, 16, 32, 64, 128, 256],
    prompt_lens=[128, 256, 512, 1024, 2048, 4096],
    prefill_len=1024,
    prefix_len=1000,
    num_runs=3,
)
_QUICK_SIZES = Sizes([64, 128], [1, 2], [16, 32], prefill_len=64, prefix_len=64, num_runs=1)


class Part(StrEnum):
    """engines: all of them side by side; growth: how cost grows, prefill and prefixes, of ours; profile: where a
    decode step of ours goes."""

    ENGINES = "engines"
    GROWTH = "growth"
    PROFILE = "profile"


def main(
    engine: Annotated[
        list[str] | None, typer.Option(help="A name or a family of the table; repeat for several; all if left out.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Streams at once; repeat; 1, 8, 32 if left out.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each engine; medians count.")] = 5,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens in.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens out.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="Of every engine.")] = os.cpu_count() or 1,
    part: Annotated[list[Part] | None, typer.Option(help="What to measure; repeat; all if left out.")] = None,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, one round: whether all of it works, not how fast.")] = False,
    results_folder: Annotated[Path, typer.Option("--results", help="Where results go.")] = _RESULTS,
) -> None:
    """Measures this machine, our engine and its peers side by side."""
    # Like an interrupt: what has been started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console()
    plan = Plan(concurrency or [1, 8, 32], rounds, prompt_len, max_tokens)
    if quick:
        plan = Plan(concurrency or [1], num_rounds=1, prompt_len=16, max_tokens=8)
    engines, parts = _chosen(engine), part or list(Part)
    console.print("measuring the machine's limits")
    reader = MemoryReader(threads)
    results = Results(
        machine=this_machine(),
        date=datetime.date.today().isoformat(),
        commit=commit(),
        prompt_len=plan.prompt_len,
        max_tokens=plan.max_tokens,
        limits=measure_limits(reader),
    )
    shape = ModelShape.read(float_folder())
    with Field(shape, threads, peers_folder() / "logs", results, console.print) as field:
        for each in engines if parts != [Part.PROFILE] else []:
            field.start(each)
        if Part.ENGINES in parts:
            field.measure_rows(plan, reader.measure)
        if Part.GROWTH in parts:
            console.print("measuring how cost grows")
            _measure_growth(shape, reader, field, results, _QUICK_SIZES if quick else _SIZES)
    if Part.PROFILE in parts:
        _profile_steps(plan, engines, reader, results, console)
    _publish(results, results_folder, console)


def _chosen(names: list[str] | None) -> list[Engine]:
    engines = all_engines()
    if names is None:
        return engines
    for name in names:
        if not any(name in (engine.name, engine.family) for engine in engines):
            known = ", ".join(engine.name for engine in engines)
            raise typer.BadParameter(f"--engine is {name!r}: must be one of {known}, or the first word of one")
    return [engine for engine in engines if engine.name in names or engine.family in names]


def _measure_growth(shape: ModelShape, reader: MemoryReader, field: Field, results: Results, sizes: Sizes) -> None:
    names = [f"{family} {results.float_weights}" for family in ("deepinfer", "llama.cpp")]
    field.keep(names)
    ours, peer = map(field.process, names)
    if ours is None:
        return
    growth = Growth(shape, reader, field, results)
    growth.add_curves([ours, peer] if peer is not None else [ours], sizes)
    growth.add_prefill_share(ours, sizes)
    growth.add_prefix_ratio(ours.engine, sizes)


def _profile_steps(plan: Plan, engines: list[Engine], reader: MemoryReader, results: Results, console: Console) -> None:
    context_len = plan.prompt_len + plan.max_tokens // 2
    for engine in engines:
        if engine.family == "deepinfer":
            console.print(f"profiling a step of {engine.name}")
            results.profiles += profile_steps(engine.weights, plan.concurrencies, context_len, results.limits, reader)


def _publish(results: Results, folder: Path, console: Console) -> None:
    from benchmarks.plots import draw_all

    folder.mkdir(parents=True, exist_ok=True)
    print_report(results, Console(width=max(console.width, _REPORT_WIDTH)))
    results.write(folder / "results.json")
    (folder / "tables.md").write_text(markdown_report(results), encoding="utf-8")
    files = draw_all(results, folder)
    console.print(f"in {folder}: results.json, tables.md, {', '.join(file.name for file in files)}")


if __name__ == "__main__":
    typer.run(main)
