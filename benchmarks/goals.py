"""What the benchmark is to show: a ratio, its goal, and how it follows from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.growth import PREFILL_SHARE, PREFIX_RATIO
from benchmarks.results import Results, Row

START_GOAL_S = 3.0


@dataclass(frozen=True, slots=True)
class Goal:
    """reached: None where it could not be measured."""

    what: str
    at_least: bool
    goal: float
    reached: float | None

    @property
    def is_met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached >= self.goal if self.at_least else self.reached <= self.goal


def goals(results: Results) -> list[Goal]:
    return [*_against_limits(results), *_against_peers(results), *_of_ours(results)]


def _against_limits(results: Results) -> Iterator[Goal]:
    weights = results.float_weights
    memory: Callable[[Row], float] = lambda row: row.share_of_memory_limit  # noqa: E731
    for of, goal in ((weights, 0.70), ("8-bit", 0.55), ("4-bit", 0.40)):
        yield Goal(f"{of}, 1 stream: decode ÷ memory limit", True, goal, _of_row(results, of, 1, memory))
    yield Goal(
        f"{weights}, 32 streams: step ÷ (compute + memory limit)",
        True,
        0.60,
        _of_row(results, weights, 32, lambda row: row.share_of_limit),
    )
    prefill = PREFILL_SHARE.format(1024)
    yield Goal(prefill, True, 0.60, results.shares.get(prefill))


def _against_peers(results: Results) -> Iterator[Goal]:
    weights = results.float_weights
    llama_cpp = ("llama.cpp", "llama.cpp-server")
    for peer, families, of, wanted in (
        ("vLLM", ("vllm",), weights, (2.0, 2.0, 1.5)),
        ("vLLM", ("vllm",), "8-bit", (2.0, 2.0, 1.5)),
        ("llama.cpp, its faster of bench and server", llama_cpp, weights, (1.4, 2.5, 2.0)),
        ("llama.cpp, its faster of bench and server", llama_cpp, "4-bit", (1.8, 3.0, 4.0)),
        ("transformers generate", ("transformers",), weights, (3.0, 3.0, 3.0)),
    ):
        for streams, goal in zip((1, 8, 32), wanted, strict=True):
            what = f"output tokens/s ÷ {peer}, {of}, {_streams(streams)}"
            yield Goal(what, True, goal, _speedup(results, "deepinfer", families, of, streams))
    for streams, goal in ((1, 2.0), (8, 2.0), (32, 1.6)):
        what = f"through Triton ÷ Triton with its vLLM backend, {weights}, {_streams(streams)}"
        yield Goal(what, True, goal, _speedup(results, "deepinfer-triton", ("triton-vllm",), weights, streams))


def _of_ours(results: Results) -> Iterator[Goal]:
    weights = results.float_weights
    yield Goal(
        "host work not hidden, share of the time at 32 streams",
        False,
        0.02,
        _of_row(results, weights, 32, lambda row: row.device_idle_share),
    )
    served, offline = (results.row(family, weights, 32) for family in ("deepinfer-triton", "deepinfer"))
    ratio = served.speedup_over(offline) if served and offline else None
    yield Goal("through Triton ÷ offline, 32 streams", True, 0.95, ratio)
    prefix = PREFIX_RATIO.format(1000)
    yield Goal(prefix, False, 0.1, results.shares.get(prefix))
    starts = [engine.start_s for engine in results.engines if engine.name == f"deepinfer {weights}"]
    yield Goal("start of the process to the first token, s", False, START_GOAL_S, starts[0] if starts else None)


def _of_row(results: Results, weights: str, streams: int, figure: Callable[[Row], float | None]) -> float | None:
    row = results.row("deepinfer", weights, streams)
    return None if row is None else figure(row)


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def _speedup(results: Results, ours_family: str, families: tuple[str, ...], weights: str, streams: int) -> float | None:
    """Of ours over the fastest of the families."""
    ours = results.row(ours_family, weights, streams)
    peers = [row for family in families if (row := results.row(family, weights, streams))]
    return min(ours.speedup_over(peer) for peer in peers) if ours and peers else None
