"""What one `make bench` found, as it lies in results.json, and the figures that follow from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.limits import Limits
from benchmarks.step_cost import Cost
from benchmarks.workload import Figures, median_ratio


@dataclass(frozen=True, slots=True)
class Machine:
    processor: str
    num_cores: int
    instruction_set: str  # the widest that torch uses
    has_bfloat16: bool
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """start_s: from the start of its process until a prompt's first token is there, model files in the page cache."""

    name: str
    family: str
    weights: str
    version: str
    start_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one number of streams.

    runs, bandwidths: one for each round; it begins with measuring memory's bandwidth. decode: what one of its decode
    steps costs, halfway through the output. operations_per_s: the limit for its weights.
    """

    engine: str
    concurrency: int
    runs: list[Figures]
    bandwidths: list[float]
    decode: Cost
    operations_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def first_token_s(self) -> float:
        return statistics.median(run.median_first_token_s for run in self.runs)

    @property
    def step_s(self) -> float:
        return statistics.median(self._steps_s())

    @property
    def device_idle_share(self) -> float | None:
        shares = [run.device_idle_share for run in self.runs if run.device_idle_share is not None]
        return statistics.median(shares) if shares else None

    @property
    def share_of_memory_limit(self) -> float:
        """A decode step against reading its bytes; 1 is the limit."""
        return median_ratio([self.decode.memory_s(bandwidth) for bandwidth in self.bandwidths], self._steps_s())

    @property
    def share_of_limit(self) -> float:
        """A decode step against reading its bytes and computing its operations."""
        limits_s = [self.decode.least_s(bandwidth, self.operations_per_s) for bandwidth in self.bandwidths]
        return median_ratio(limits_s, self._steps_s())

    def speedup_over(self, other: Row) -> float:
        """Median over the rounds of this one's output tokens/s ÷ the other's."""
        return median_ratio([run.tokens_per_s for run in self.runs], [run.tokens_per_s for run in other.runs])

    def _steps_s(self) -> list[float]:
        return [run.step_s for run in self.runs if run.step_s is not None]


@dataclass(frozen=True, slots=True)
class Curve:
    """How `what` of one engine grows with `along`, and the machine's limit at each point."""

    along: str
    what: str
    engine: str
    points: list[int]
    measured: list[float]
    limits: list[float]


@dataclass(frozen=True, slots=True)
class StepPart:
    """Seconds of a decode step in all calls of some operators, and what they read and compute."""

    name: str
    seconds: float
    cost: Cost


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Where a decode step of ours goes; whole_s: the same step in one call, beside its parts. The limits: as in Row."""

    weights: str
    concurrency: int
    bandwidth: float
    operations_per_s: float
    whole_s: float
    parts: list[StepPart]


@dataclass(slots=True)
class Results:
    """missing: engine → why it was not measured, and what would help. shares: ratios measured of ours alone."""

    machine: Machine
    date: str
    commit: str
    prompt_len: int
    max_tokens: int
    limits: Limits
    engines: list[EngineFacts] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    curves: list[Curve] = field(default_factory=list)
    profiles: list[StepProfile] = field(default_factory=list)

    @property
    def float_weights(self) -> str:
        """The weights for which ours and the peers are compared unquantized."""
        return "bf16" if self.machine.has_bfloat16 else "f32"

    def row(self, family: str, weights: str, concurrency: int) -> Row | None:
        name = f"{family} {weights}"
        return next((row for row in self.rows if (row.engine, row.concurrency) == (name, concurrency)), None)

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def read(file: Path) -> Results:
        return msgspec.json.decode(file.read_bytes(), type=Results)
