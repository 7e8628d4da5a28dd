"""`make bench-scaling`: how throughput and latency go with the number of engines, up to 1,024, in a simulation.

Writes scaling.json and plots into benchmarks/results/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import commit, this_machine
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.figures import Results, Run
from benchmarks.scaling.frontend_cost import measure_frontend
from benchmarks.scaling.requests import WORKLOADS
from benchmarks.scaling.sweep import Part, all_plans, costs_of

_RESULTS = Path(__file__).parents[1] / "results"
_COLUMNS = (
    "layout",
    "workload",
    "requests/s each",
    "devices",
    "prompt engines",
    "tokens/s",
    "÷ offered",
    "each",
    "first token ms",
    "p99",
    "second ms",
    "p99",
    "gap ms",
    "p99",
    "prefill %",
    "compute %",
    "send %",
    "receive %",
    "frontend %",
    "hand-over MB",
    "took s",
)


def main(
    results_folder: Annotated[Path, typer.Option("--results", help="Where results go.")] = _RESULTS,
) -> None:
    """Simulates all sizes and layouts; some five minutes on one core."""
    from benchmarks.scaling.plots import draw_all

    console = Console(width=230)
    measured = measure_frontend()
    console.print(f"measured on this machine: {measured}")
    results = Results(this_machine(), commit(), Costs(), measured, list(WORKLOADS))
    for part in Part:
        table = Table(*_COLUMNS, title=part.value)
        for plan in all_plans(results.costs.device):
            if plan.part is part:
                run = plan.run(costs_of(plan, measured))
                results.runs.append(run)
                table.add_row(*_cells(run))
        console.print(table)
    results_folder.mkdir(parents=True, exist_ok=True)
    results.write(results_folder / "scaling.json")
    files = draw_all(results, results_folder)
    console.print(f"in {results_folder}: scaling.json, {', '.join(file.name for file in files)}")


def _cells(run: Run) -> list[str]:
    figures = run.figures
    waits_s = (*figures.first_token_s, *figures.second_gap_s, *figures.gap_s)
    shares = (
        figures.prompt_engine_share,
        figures.engine_share,
        figures.prompt_link_share,
        figures.link_share,
        figures.frontend_share,
    )
    return [
        run.layout,
        run.workload,
        f"{run.requests_per_s:g}",
        f"{run.num_devices}",
        f"{run.num_prompt_engines}",
        f"{figures.tokens_per_s:.0f}",
        f"{figures.tokens_per_s / figures.offered_tokens_per_s:.2f}",
        f"{figures.tokens_per_s / run.num_devices:.0f}",
        *(f"{1e3 * wait_s:.1f}" for wait_s in waits_s),
        *(f"{100 * share:.0f}" for share in shares),
        f"{figures.hand_over_bytes / 1e6:.0f}",
        f"{run.seconds:.1f}",
    ]


if __name__ == "__main__":
    typer.run(main)
