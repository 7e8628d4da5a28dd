"""The results as pictures: throughput and latency against devices; SVG files, the same for the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.scaling.figures import Results, Run
from benchmarks.scaling.sweep import Layout, Part

_COLORS = {Layout.UNSPLIT: "#c0392b", Layout.SPLIT: "#2471a3", Layout.LOCKSTEP: "#7d3c98"}
_MARKERS = {Layout.UNSPLIT: "o", Layout.SPLIT: "s", Layout.LOCKSTEP: "^"}
_STYLES = {"chat": "-", "long prompts": "--"}

# In lockstep the load is too much from 4 devices on: only its gaps do not depend on when the simulation ends.
_STEADY = (Layout.UNSPLIT, Layout.SPLIT)

Figure = Callable[[Run], float]


def draw_all(results: Results, folder: Path) -> list[Path]:
    # Else ids are random, so that the file changes with every run.
    with matplotlib.rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none"}):
        return [
            _draw(
                results,
                folder / "scaling_throughput.svg",
                _STEADY,
                "output tokens/s",
                lambda run: run.figures.tokens_per_s,
            ),
            _draw(
                results,
                folder / "scaling_first_token.svg",
                _STEADY,
                "ms to the first token, 99th percentile",
                lambda run: 1e3 * run.figures.first_token_s[1],
            ),
            _draw(
                results,
                folder / "scaling_gap.svg",
                tuple(Layout),
                "ms from one token to the next, 99th percentile",
                lambda run: 1e3 * run.figures.gap_s[1],
            ),
        ]


def _draw(results: Results, file: Path, layouts: tuple[Layout, ...], label: str, figure: Figure) -> Path:
    picture, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for workload in results.workloads:
        for layout in layouts:
            _add_line(axes, results.of(Part.SIZES, layout, workload.name), layout, workload.name, figure)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel=label)
    sizes = sorted({run.num_devices for run in results.runs if run.part == Part.SIZES})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    picture.savefig(file, metadata={"Date": None})
    plt.close(picture)
    return file


def _add_line(axes: Axes, runs: list[Run], layout: Layout, workload: str, figure: Figure) -> None:
    axes.plot(
        [run.num_devices for run in runs],
        [figure(run) for run in runs],
        color=_COLORS[layout],
        marker=_MARKERS[layout],
        linestyle=_STYLES[workload],
        label=f"{layout}, {workload}",
    )
