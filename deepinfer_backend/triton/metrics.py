"""Engine counters and ended requests → Triton's metrics endpoint."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from deepinfer_backend.engine.messages import EngineStats
from deepinfer_backend.triton.generate_request import RequestSummary
from deepinfer_backend.triton.metric_families import (
    ENGINE_FAMILIES,
    INTER_TOKEN_LATENCY,
    MAX_TOKEN_GAPS,
    NUM_HIT_RATIO_REQUESTS,
    PREFIX_CACHE_HIT_RATIO,
    REQUEST_FAMILIES,
    REQUEST_HISTOGRAMS,
    MetricFamily,
    MetricKind,
    counted_as,
    is_answered,
)
from deepinfer_backend.triton.token_gaps import TokenGaps

_MAX_PUBLISH_S = 0.01  # of one call: whoever looks for cancelled requests between two calls must not wait for long
_MAX_TAKEN_REQUESTS = 1000  # by one call
_MAX_KEPT_REQUESTS = 65_536
_MAX_KEPT_VALUES = 65_536

_KINDS = {
    MetricKind.GAUGE: pb_utils.MetricFamily.GAUGE,
    MetricKind.COUNTER: pb_utils.MetricFamily.COUNTER,
    MetricKind.HISTOGRAM: pb_utils.MetricFamily.HISTOGRAM,
}


class ModelMetrics:
    """One model's metrics. Those of the engine are there only if the model is told its stats: it owns the engine then.

    Each value that Triton is told costs 20 µs of CPU. So the methods that take note may be called from any thread and
    tell Triton nothing; `publish` and `close` belong to one thread.
    """

    def __init__(self, model_name: str, model_version: str) -> None:
        self._triton = _TritonMetrics(model_name, model_version)
        self._lock = threading.Lock()  # guards _engines: each rank has a thread
        self._engines: dict[int, _EngineTotals] = {}  # by rank; replaced as a whole
        self._published_values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._published_engines = self._engines
        self._requests: deque[RequestSummary] = deque(maxlen=_MAX_KEPT_REQUESTS)
        self._token_gaps = TokenGaps(MAX_TOKEN_GAPS)
        self._values: deque[tuple[MetricFamily, float]] = deque(maxlen=_MAX_KEPT_VALUES)  # not told yet
        self._hit_ratio = _HitRatio()
        for family in REQUEST_FAMILIES:
            self._triton.add(family)

    def record_stats(self, rank: int, stats: EngineStats) -> None:
        with self._lock:
            known = self._engines.get(rank)
            before = EngineStats() if known is None else known.before
            self._engines = {**self._engines, rank: _EngineTotals(stats, before)}

    def record_engine_death(self, rank: int) -> None:
        """To be called by the thread that records the rank's stats: its next engine counts from zero."""
        with self._lock:
            if rank in self._engines:
                self._engines = {**self._engines, rank: self._engines[rank].without_engine()}

    def record_request(self, request: RequestSummary) -> None:
        """A RequestObserver."""
        self._requests.append(request)

    def record_tokens(self, num_tokens: int, gap_s: float) -> None:
        """So many tokens of a sequence came, each `gap_s` seconds after the one before."""
        self._token_gaps.add(num_tokens, gap_s)

    def publish(self) -> bool:
        """Tells Triton what is new; in bounded time, so that there may be more to tell: then it returns true."""
        deadline_s = time.monotonic() + _MAX_PUBLISH_S
        # The stats that are here now count the tokens of every request that is here now: whoever sees a request sees
        # its tokens.
        num_requests = min(len(self._requests), _MAX_TAKEN_REQUESTS)
        self._publish_engine()
        if not self._values:  # else this call is one more of the same interval
            self._values.extend((INTER_TOKEN_LATENCY, gap_s) for gap_s in self._token_gaps.take())
        self._take_requests(num_requests)
        while self._values and time.monotonic() < deadline_s:
            family, value = self._values.popleft()
            self._triton.metric(family).observe(value)
        return bool(self._values) or num_requests == _MAX_TAKEN_REQUESTS

    def close(self) -> None:
        """Nothing of the model stays on the endpoint."""
        self._triton.close()

    def _publish_engine(self) -> None:
        engines = self._engines
        if engines is self._published_engines:
            return
        if not self._published_engines:
            for each in ENGINE_FAMILIES:
                self._triton.add(each.family)
        self._published_engines = engines
        now = sum((engine.stats for engine in engines.values()), EngineStats())
        before = sum((engine.before for engine in engines.values()), EngineStats())
        for each in ENGINE_FAMILIES:
            for label_value, read in each.series.items():
                is_gauge = each.family.kind is MetricKind.GAUGE
                value = read(now) if is_gauge else read(before) + read(now)
                key = (each.family.name, label_value)
                if value == self._published_values[key]:
                    continue
                metric = self._triton.metric(each.family, label_value)
                if is_gauge:
                    metric.set(value)
                else:
                    metric.increment(value - self._published_values[key])
                self._published_values[key] = value

    def _take_requests(self, num_requests: int) -> None:
        increases: Counter[tuple[MetricFamily, str]] = Counter()
        for _ in range(num_requests):
            request = self._requests.popleft()
            increases.update(counted_as(request))
            if not is_answered(request):
                continue
            self._hit_ratio.add(request)
            for histogram in REQUEST_HISTOGRAMS:
                value = histogram.value_of(request)
                if value is not None:
                    self._values.append((histogram.family, value))
        for (family, label_value), increase in increases.items():
            self._triton.metric(family, label_value).increment(increase)
        if num_requests:
            self._triton.metric(PREFIX_CACHE_HIT_RATIO).set(self._hit_ratio.value)


@dataclass(frozen=True, slots=True)
class _EngineTotals:
    """What the engine tells, and what those before it had counted in all."""

    stats: EngineStats
    before: EngineStats

    def without_engine(self) -> _EngineTotals:
        return _EngineTotals(EngineStats(), self.before + self.stats)


class _HitRatio:
    """The share of cached prompt tokens over the last requests."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()
        self._num_cached = self._num_prompt = 0

    def add(self, request: RequestSummary) -> None:
        self._counts.append((request.num_cached_tokens, request.num_prompt_tokens))
        self._num_cached += request.num_cached_tokens
        self._num_prompt += request.num_prompt_tokens
        if len(self._counts) > NUM_HIT_RATIO_REQUESTS:
            num_cached, num_prompt = self._counts.popleft()
            self._num_cached -= num_cached
            self._num_prompt -= num_prompt

    @property
    def value(self) -> float:
        return self._num_cached / max(1, self._num_prompt)


class _TritonMetrics:
    """Triton's side of the families: one Metric for each series. A label's value that is new makes a new one."""

    def __init__(self, model_name: str, model_version: str) -> None:
        self._labels = {"model": model_name, "version": model_version}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}

    def add(self, family: MetricFamily) -> None:
        self._families[family.name] = pb_utils.MetricFamily(
            name=family.name, description=family.description, kind=_KINDS[family.kind]
        )
        for label_value in family.label_values:
            self.metric(family, label_value)

    def metric(self, family: MetricFamily, label_value: str = "") -> Any:
        """Of a family that was added."""
        key = (family.name, label_value)
        if key not in self._metrics:
            labels = {**self._labels, family.label: label_value} if family.label else self._labels
            options = {"buckets": list(family.buckets)} if family.buckets else {}
            self._metrics[key] = self._families[family.name].Metric(labels=labels, **options)
        return self._metrics[key]

    def close(self) -> None:
        """Triton wants each metric gone before its family."""
        self._metrics.clear()
        self._families.clear()
