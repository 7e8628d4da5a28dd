"""Engines in turn: every round runs each engine once, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.engines.catalogue import weight_bytes
from benchmarks.engines.engine import Engine, EngineFailedError, EngineProcess
from benchmarks.results import EngineFacts, Results, Row
from benchmarks.step_cost import ModelShape, decode_cost
from benchmarks.workload import Figures, Work, make_prompts, num_prompts_for

T = TypeVar("T")

_WARM_UP_TOKENS = 8
_START_PROMPT_LEN = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """The same work for every engine: its streams, its lengths, and how often."""

    concurrencies: list[int]
    num_rounds: int
    prompt_len: int
    max_tokens: int


def interleaved(items: Sequence[T], num_rounds: int) -> Iterator[list[T]]:
    """Each round has every item once; they take turns at going first, so that none always follows the same other."""
    for index in range(num_rounds):
        first = index % max(1, len(items))
        yield [*items[first:], *items[:first]]


class Field:
    """Owns the processes of the engines that run here; those that do not, or fail later, are in results.missing."""

    def __init__(self, shape: ModelShape, num_threads: int, logs: Path, results: Results, say: Callable[[str], None]):
        self._shape = shape
        self._num_threads = num_threads
        self._logs = logs
        self._results = results
        self._say = say
        self._processes: list[EngineProcess] = []

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def start(self, engine: Engine) -> EngineProcess | None:
        """Loaded, warm and idle; None if it does not run here."""
        if what_to_do := engine.missing():
            self._results.missing[engine.name] = f"not installed: {what_to_do}"
            return None
        self._say(f"starting {engine.name}")
        try:
            engine.arguments()  # makes its model's files if need be, which is not part of its start
        except OSError as error:
            self._results.missing[engine.name] = f"its model cannot be written: {error}"
            return None
        process = EngineProcess(engine, self._num_threads, self._logs / f"{engine.name.replace(' ', '-')}.log")
        self._processes.append(process)
        began_s = time.perf_counter()
        try:
            process.start()
        except EngineFailedError as error:
            self._give_up(process, error)
            return None
        prompts = make_prompts(self._shape.vocab_size, 1, _START_PROMPT_LEN)
        if self.run(process, Work(prompts, concurrency=1, max_tokens=1)) is None:
            return None
        start_s = time.perf_counter() - began_s
        self._results.engines.append(EngineFacts(engine.name, engine.family, engine.weights, process.version, start_s))
        return process

    def process(self, engine: str) -> EngineProcess | None:
        return next((process for process in self._processes if process.engine.name == engine), None)

    def run(self, process: EngineProcess, work: Work) -> Figures | None:
        """None if it has failed, now or before."""
        if process not in self._processes:
            return None
        try:
            return process.run(work)
        except EngineFailedError as error:
            self._give_up(process, error)
            return None

    def keep(self, names: Sequence[str]) -> None:
        """Ends all engines but these: the longest contexts need the memory that idle ones hold."""
        for process in list(self._processes):
            if process.engine.name not in names:
                self.stop(process)

    def stop(self, process: EngineProcess) -> None:
        if process in self._processes:
            self._processes.remove(process)
            process.close()

    def measure_rows(self, plan: Plan, measure_bandwidth: Callable[[], float]) -> None:
        """Adds a row for each engine and number of streams. measure_bandwidth: of memory, once for each round."""
        for concurrency in plan.concurrencies:
            prompts = make_prompts(self._shape.vocab_size, num_prompts_for(concurrency), plan.prompt_len)
            work = Work(prompts, concurrency, plan.max_tokens)
            warm_up = Work(prompts[:concurrency], concurrency, min(plan.max_tokens, _WARM_UP_TOKENS))
            for process in list(self._processes):
                self.run(process, warm_up)
            runs: dict[str, list[Figures]] = {process.engine.name: [] for process in self._processes}
            bandwidths = []
            for index, order in enumerate(interleaved(list(self._processes), plan.num_rounds)):
                bandwidths.append(measure_bandwidth())
                for process in order:
                    if figures := self.run(process, work):
                        runs[process.engine.name].append(figures)
                        self._say(
                            f"{concurrency} streams, round {index + 1} of {plan.num_rounds}: {process.engine.name}, "
                            f"{figures.tokens_per_s:.0f} tokens/s"
                        )
            for process in self._processes:
                self._results.rows.append(self._row(process.engine, plan, concurrency, runs, bandwidths))

    def _row(
        self, engine: Engine, plan: Plan, concurrency: int, runs: dict[str, list[Figures]], bandwidths: list[float]
    ) -> Row:
        context_len = plan.prompt_len + plan.max_tokens / 2
        return Row(
            engine=engine.name,
            concurrency=concurrency,
            runs=runs[engine.name],
            bandwidths=bandwidths,
            decode=decode_cost(
                self._shape, weight_bytes(engine, self._shape), engine.kv_bytes, concurrency, context_len
            ),
            operations_per_s=self._results.limits.operations(engine.weights),
        )

    def _give_up(self, process: EngineProcess, error: EngineFailedError) -> None:
        self.stop(process)
        self._results.missing[process.engine.name] = str(error)
        self._say(f"{process.engine.name} is left out: {str(error).splitlines()[0]}")
