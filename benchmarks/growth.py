"""What is measured beside the table: how cost grows with context, streams and prompt; prefill; shared prefixes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.engines.catalogue import weight_bytes, with_prefix_cache
from benchmarks.engines.engine import Engine, EngineProcess
from benchmarks.limits import MemoryReader
from benchmarks.measure import Field
from benchmarks.results import Curve, Results
from benchmarks.step_cost import Cost, ModelShape, decode_cost, prefill_cost
from benchmarks.workload import Figures, Work, make_prompts, median_ratio

PREFILL_SHARE = "prefill of {:,} tokens ÷ matrix-product limit"
PREFIX_RATIO = "time to first token with a shared {:,}-token prefix ÷ without"

_NUM_TOKENS = 32
_SHORT_PROMPT_LEN = 32
_TAIL_LEN = 24  # what comes after the shared prefix
_LONG_POINT_S = 20.0  # after which a point is not measured once more


@dataclass(frozen=True, slots=True)
class Sizes:
    """The points of each curve, and how often each is measured: less often where once takes long already."""

    context_lens: list[int]
    streams: list[int]
    prompt_lens: list[int]
    prefill_len: int
    prefix_len: int
    num_runs: int


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One plot: work and cost at each point, and how seconds are shown (measured and least possible ones alike)."""

    along: str
    what: str
    points: list[int]
    work: Callable[[int], Work]
    cost: Callable[[Engine, int], Cost]
    seconds: Callable[[Figures], float | None]
    shown: Callable[[int, float], float]


class Growth:
    """Measures engines that stand in `field` already, in turn at each point, into `results`."""

    def __init__(self, shape: ModelShape, reader: MemoryReader, field: Field, results: Results) -> None:
        self._shape = shape
        self._reader = reader
        self._field = field
        self._results = results

    def add_curves(self, processes: list[EngineProcess], sizes: Sizes) -> None:
        for sweep in self._sweeps(sizes):
            curves = {
                process.engine.name: Curve(sweep.along, sweep.what, process.engine.name, [], [], [])
                for process in processes
            }
            for point in sweep.points:
                work = sweep.work(point)
                seconds: dict[str, list[float]] = {name: [] for name in curves}
                bandwidths: list[float] = []
                began_s = time.perf_counter()
                while len(bandwidths) < sizes.num_runs and time.perf_counter() - began_s < _LONG_POINT_S:
                    bandwidths.append(self._reader.measure())
                    for process in processes:
                        figures = self._field.run(process, work)
                        if figures is not None and (taken_s := sweep.seconds(figures)) is not None:
                            seconds[process.engine.name].append(taken_s)
                for process in processes:
                    engine, curve = process.engine, curves[process.engine.name]
                    if taken := seconds[engine.name]:
                        operations = self._results.limits.operations(engine.weights)
                        least_s = sweep.cost(engine, point).least_s(statistics.median(bandwidths), operations)
                        curve.points.append(point)
                        curve.measured.append(sweep.shown(point, statistics.median(taken)))
                        curve.limits.append(sweep.shown(point, least_s))
            self._results.curves += curves.values()

    def add_prefill_share(self, process: EngineProcess, sizes: Sizes) -> None:
        """How near the prefill of one long prompt comes to matrix products alone."""
        operations = self._results.limits.operations(process.engine.weights)
        least_s = self._prefill_cost(process.engine, sizes.prefill_len).num_operations / operations
        shares = []
        for prompt in make_prompts(self._shape.vocab_size, sizes.num_runs, sizes.prefill_len):
            if figures := self._field.run(process, Work([prompt], concurrency=1, max_tokens=1)):
                shares.append(least_s / figures.first_token_s[0])
        if shares:
            self._results.shares[PREFILL_SHARE.format(sizes.prefill_len)] = statistics.median(shares)

    def add_prefix_ratio(self, like: Engine, sizes: Sizes) -> None:
        """Two prompts that begin alike, one after the other: the second finds the first one's blocks."""
        process = self._field.start(with_prefix_cache(like))
        if process is None:
            return
        prefixes = make_prompts(self._shape.vocab_size, sizes.num_runs, sizes.prefix_len, seed=1)
        tails = make_prompts(self._shape.vocab_size, 2, _TAIL_LEN, seed=2)
        without_s, with_s = [], []
        for prefix in prefixes:
            work = Work([prefix + tail for tail in tails], concurrency=1, max_tokens=1)
            if figures := self._field.run(process, work):
                without_s.append(figures.first_token_s[0])
                with_s.append(figures.first_token_s[1])
        self._field.stop(process)
        if with_s:
            self._results.shares[PREFIX_RATIO.format(sizes.prefix_len)] = median_ratio(with_s, without_s)

    def _sweeps(self, sizes: Sizes) -> list[_Sweep]:
        return [
            _Sweep(
                along="tokens of context, one stream",
                what="ms a token",
                points=sizes.context_lens,
                # The output ends at the point: the longest one is all that the model takes.
                work=lambda point: self._work(1, point - _NUM_TOKENS, _NUM_TOKENS),
                cost=lambda engine, point: self._decode_cost(engine, 1, point - _NUM_TOKENS // 2),
                seconds=lambda figures: figures.step_s,
                shown=lambda _, seconds: 1e3 * seconds,
            ),
            _Sweep(
                along="streams",
                what="tokens/s while decoding",
                points=sizes.streams,
                work=lambda point: self._work(point, _SHORT_PROMPT_LEN, _NUM_TOKENS),
                cost=lambda engine, point: self._decode_cost(engine, point, _SHORT_PROMPT_LEN + _NUM_TOKENS // 2),
                seconds=lambda figures: figures.step_s,
                shown=lambda point, seconds: point / seconds,
            ),
            _Sweep(
                along="tokens of prompt, one stream",
                what="ms to the first token",
                points=sizes.prompt_lens,
                work=lambda point: self._work(1, point, 1),
                cost=self._prefill_cost,
                seconds=lambda figures: figures.median_first_token_s,
                shown=lambda _, seconds: 1e3 * seconds,
            ),
        ]

    def _work(self, streams: int, prompt_len: int, max_tokens: int) -> Work:
        return Work(make_prompts(self._shape.vocab_size, streams, prompt_len), streams, max_tokens)

    def _decode_cost(self, engine: Engine, streams: int, context_len: int) -> Cost:
        return decode_cost(self._shape, weight_bytes(engine, self._shape), engine.kv_bytes, streams, context_len)

    def _prefill_cost(self, engine: Engine, prompt_len: int) -> Cost:
        return prefill_cost(self._shape, weight_bytes(engine, self._shape), engine.kv_bytes, 1, prompt_len)
