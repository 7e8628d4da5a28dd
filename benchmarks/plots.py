"""The results as pictures: a roofline, latency against throughput, and how cost grows; PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatter

from benchmarks.results import Curve, Results, Row

_COLORS = {
    "deepinfer": "#c0392b",
    "deepinfer-triton": "#e67e22",
    "vllm": "#2471a3",
    "triton-vllm": "#85c1e9",
    "llama.cpp": "#1e8449",
    "llama.cpp-server": "#76c893",
    "transformers": "#7d3c98",
}
_MARKERS = {"f32": "s", "bf16": "o", "8-bit": "^", "4-bit": "v"}
_STYLES = {"f32": "-", "bf16": "-.", "8-bit": "--", "4-bit": ":"}
_LIMIT_COLOR = "#555555"


def draw_all(results: Results, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    if results.rows:
        files += [
            _draw(folder / "roofline.png", lambda axes: _roofline(axes, results)),
            _draw(folder / "latency_throughput.png", lambda axes: _latency_throughput(axes, results)),
        ]
    for along in dict.fromkeys(curve.along for curve in results.curves):
        curves = [curve for curve in results.curves if curve.along == along and curve.points]
        if curves:
            name = along.partition(",")[0].replace(" ", "_")
            files.append(_draw(folder / f"{name}.png", lambda axes, curves=curves: _growth(axes, curves)))  # type: ignore[misc]
    return files


def _draw(file: Path, draw: Callable[[Axes], None]) -> Path:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    draw(axes)
    axes.grid(True, which="major", color="#dddddd")
    axes.grid(True, which="minor", axis="y", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return file


def _roofline(axes: Axes, results: Results) -> None:
    limits = results.limits
    intensities = [row.decode.intensity for row in results.rows]
    span = np.geomspace(min(intensities) / 2, max(*intensities, limits.float32 / limits.bandwidth) * 4, 100)
    for name, rate in (("float32", limits.float32), ("bfloat16", limits.bfloat16), ("int8", limits.int8)):
        # One that this machine computes slower than float32 limits nobody.
        if rate >= limits.float32:
            axes.plot(span, np.minimum(span * limits.bandwidth, rate) / 1e9, color=_LIMIT_COLOR, linewidth=1)
            axes.annotate(name, (span[-1], rate / 1e9), ha="right", va="bottom", fontsize="small", color=_LIMIT_COLOR)
    for engine, rows in _by_engine(results).items():
        family, weights = engine.rsplit(" ", 1)
        axes.plot(
            [row.decode.intensity for row in rows],
            [row.decode.num_operations / row.step_s / 1e9 for row in rows],
            marker=_MARKERS[weights],
            linestyle=_STYLES[weights],
            linewidth=0.8,
            color=_COLORS[family],
            label=engine,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="GFLOP/s")
    _write_numbers(axes.xaxis, axes.yaxis)
    axes.set_title(f"Decode steps under the machine's roof ({limits.bandwidth / 1e9:.0f} GB/s)")


def _latency_throughput(axes: Axes, results: Results) -> None:
    for engine, rows in _by_engine(results).items():
        family, weights = engine.rsplit(" ", 1)
        axes.plot(
            [1e3 * row.step_s for row in rows],
            [row.tokens_per_s for row in rows],
            marker=_MARKERS[weights],
            linestyle=_STYLES[weights],
            color=_COLORS[family],
            label=engine,
        )
        for row in rows:
            axes.annotate(
                str(row.concurrency),
                (1e3 * row.step_s, row.tokens_per_s),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize="x-small",
                color=_COLORS[family],
            )
    axes.set(xscale="log", yscale="log", xlabel="ms from one token of a stream to the next (median)")
    _write_numbers(axes.xaxis, axes.yaxis)
    axes.set_ylabel("output tokens/s of all streams, prefill counted")
    axes.set_title("Latency and throughput; the numbers are concurrent streams")


def _growth(axes: Axes, curves: list[Curve]) -> None:
    for curve in curves:
        family, weights = curve.engine.rsplit(" ", 1)
        axes.plot(curve.points, curve.measured, marker=_MARKERS[weights], color=_COLORS[family], label=curve.engine)
        axes.plot(
            curve.points,
            curve.limits,
            color=_COLORS[family],
            linestyle=":",
            linewidth=1.2,
            label=f"limit of {curve.engine}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _write_numbers(axes.yaxis)
    points = sorted({point for curve in curves for point in curve.points})
    axes.set_xticks(points, [f"{point:,}" for point in points])
    axes.set(xlabel=curves[0].along, ylabel=curves[0].what)
    limit = "dotted: reading memory and matrix products alone, one after the other"
    axes.set_title(f"{curves[0].what}, by {curves[0].along}\n{limit}", fontsize="medium")


class _PlainNumbers(LogFormatter):  # type: ignore[misc]
    """200, not 2×10²."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _write_numbers(*scales: Axis) -> None:
    """Between powers of ten only where there are few of those."""
    for scale in scales:
        scale.set_major_formatter(_PlainNumbers(labelOnlyBase=False))
        scale.set_minor_formatter(_PlainNumbers(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def _by_engine(results: Results) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for row in sorted(results.rows, key=lambda row: row.concurrency):
        rows.setdefault(row.engine, []).append(row)
    return rows
