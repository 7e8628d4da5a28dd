"""What a simulation found, between a warm-up and an end, and how it lies in scaling.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.results import Machine
from benchmarks.scaling.costs import Costs, FrontendCosts
from benchmarks.scaling.requests import Workload


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of simulated time that count."""

    from_s: float
    to_s: float

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s

    def __contains__(self, time_s: float) -> bool:
        return self.from_s <= time_s < self.to_s


@dataclass(frozen=True, slots=True)
class Figures:
    """first_token_s, second_gap_s, gap_s: [median, 99th percentile] of the wait for a request's first token, of that
    from the first to the second, and of all from one token to the next.

    Shares are of the time: in which prompt engines, and those that decode, compute; in which their links are busy, and
    the frontend. hand_over_bytes: of a prompt, on average. A share or a number of what there is not is 0.
    """

    offered_tokens_per_s: float
    tokens_per_s: float
    first_token_s: list[float]
    second_gap_s: list[float]
    gap_s: list[float]
    prompt_engine_share: float
    engine_share: float
    prompt_link_share: float
    link_share: float
    frontend_share: float
    hand_over_bytes: float


@dataclass(slots=True)
class Record:
    """What happens in a simulation; only what is in the window is kept.

    A share's time counts where it ends, so that it can come out a step's length wrong.
    """

    window: Window
    num_offered: int = 0
    num_tokens: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    second_gaps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_gaps: list[int] = field(default_factory=list)  # how many tokens had each of gaps_s
    prompt_engines_s: float = 0.0
    engines_s: float = 0.0
    transfers_s: float = 0.0
    frontend_s: float = 0.0
    hand_overs_bytes: list[int] = field(default_factory=list)

    def add_first_token(self, at_s: float, waited_s: float) -> None:
        if at_s in self.window:
            self.num_tokens += 1
            self.first_tokens_s.append(waited_s)

    def add_second_token(self, at_s: float, gap_s: float) -> None:
        self.add_gap(at_s, gap_s, 1)
        if at_s in self.window:
            self.second_gaps_s.append(gap_s)

    def add_gap(self, at_s: float, gap_s: float, num_tokens: int) -> None:
        if num_tokens and at_s in self.window:
            self.num_tokens += num_tokens
            self.gaps_s.append(gap_s)
            self.num_gaps.append(num_tokens)

    def figures(self, num_prompt_engines: int, num_engines: int) -> Figures:
        """num_engines: those that decode."""
        length_s = self.window.length_s
        prompt_engines_length_s = length_s * max(1, num_prompt_engines)
        return Figures(
            offered_tokens_per_s=self.num_offered / length_s,
            tokens_per_s=self.num_tokens / length_s,
            first_token_s=_quantiles(self.first_tokens_s, [1] * len(self.first_tokens_s)),
            second_gap_s=_quantiles(self.second_gaps_s, [1] * len(self.second_gaps_s)),
            gap_s=_quantiles(self.gaps_s, self.num_gaps),
            prompt_engine_share=self.prompt_engines_s / prompt_engines_length_s,
            engine_share=self.engines_s / (length_s * num_engines),
            prompt_link_share=self.transfers_s / prompt_engines_length_s,
            link_share=self.transfers_s / (length_s * num_engines),
            frontend_share=self.frontend_s / length_s,
            hand_over_bytes=float(np.mean(self.hand_overs_bytes)) if self.hand_overs_bytes else 0.0,
        )


def _quantiles(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The least values that half of the weight, and 99% of it, does not exceed."""
    if not values:
        return [0.0, 0.0]
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(np.asarray(weights)[order])
    at = np.searchsorted(sums, [0.5 * sums[-1], 0.99 * sums[-1]])
    quantiles: list[float] = np.asarray(values)[order][at].tolist()
    return quantiles


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. num_prompt_engines of num_devices only prefill, in the split layout. seconds: that it took."""

    part: str
    layout: str
    workload: str
    requests_per_s: float
    num_devices: int
    num_prompt_engines: int
    window: Window
    figures: Figures
    seconds: float


@dataclass(slots=True)
class Results:
    machine: Machine
    commit: str
    costs: Costs
    frontend: FrontendCosts  # as measured
    workloads: list[Workload]
    runs: list[Run] = field(default_factory=list)

    def of(self, part: str, layout: str, workload: str = "chat") -> list[Run]:
        return [run for run in self.runs if (run.part, run.layout, run.workload) == (part, layout, workload)]

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
