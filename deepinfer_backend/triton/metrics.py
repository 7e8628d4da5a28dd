"""Engine counters and request latencies → Triton's metrics endpoint."""

from __future__ import annotations

from collections import deque
from typing import Any

import triton_python_backend_utils as pb_utils

from deepinfer_backend.engine.messages import EngineStats
from deepinfer_backend.triton.generate_request import RequestSummary

_GAUGES = {
    "deepinfer_requests_running": "Sequences in the engine's running batch.",
    "deepinfer_requests_waiting": "Sequences that wait for their prefill.",
    "deepinfer_kv_cache_usage_ratio": "Share of KV-cache blocks in use, 0 to 1.",
}
_COUNTERS = {
    "deepinfer_prompt_tokens_total": "Prompt tokens taken in.",
    "deepinfer_cached_prompt_tokens_total": "Prompt tokens found in the prefix cache.",
    "deepinfer_generation_tokens_total": "Tokens generated.",
    "deepinfer_preemptions_total": "Sequences that gave up their KV blocks to others.",
}
_HISTOGRAMS = {
    "deepinfer_time_to_first_token_seconds": "From arrival to the first token.",
    "deepinfer_e2e_request_latency_seconds": "From arrival to the last token.",
}
_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]
_MAX_KEPT_REQUESTS = 65_536


class ModelMetrics:
    """One model's metrics.

    `record_stats` and `record_request` may be called from any thread and only take note; `publish` and `close` belong
    to one thread: each value that Triton is told costs 20 µs, so the step and the responder do not pay for it.
    """

    def __init__(self, model_name: str, model_version: str) -> None:
        self._labels = {"model": model_name, "version": model_version}
        self._families: list[Any] = []
        self._metrics: dict[str, Any] = {}
        self._stats = EngineStats()
        self._published = EngineStats()
        self._requests: deque[RequestSummary] = deque(maxlen=_MAX_KEPT_REQUESTS)
        kinds = pb_utils.MetricFamily
        for name, description in _GAUGES.items():
            self._add(name, description, kinds.GAUGE)
        for name, description in _COUNTERS.items():
            self._add(name, description, kinds.COUNTER)
        for name, description in _HISTOGRAMS.items():
            self._add(name, description, kinds.HISTOGRAM, buckets=_BUCKETS_S)

    def record_stats(self, stats: EngineStats) -> None:
        self._stats = stats

    def record_request(self, request: RequestSummary) -> None:
        self._requests.append(request)

    def publish(self) -> None:
        """Tells Triton what changed since the last call."""
        # Requests first: whoever sees one in them sees its tokens in the counters.
        while self._requests:
            self._publish_request(self._requests.popleft())
        stats, before = self._stats, self._published
        if stats is not before:
            self._published = stats
            # A new engine counts from zero.
            self._publish_stats(stats, before if before.num_steps <= stats.num_steps else EngineStats())

    def _publish_request(self, request: RequestSummary) -> None:
        if request.error is not None:
            return
        if request.first_token_time_ns:
            first_token_s = (request.first_token_time_ns - request.arrival_time_ns) / 1e9
            self._metrics["deepinfer_time_to_first_token_seconds"].observe(first_token_s)
        e2e_s = (request.end_time_ns - request.arrival_time_ns) / 1e9
        self._metrics["deepinfer_e2e_request_latency_seconds"].observe(e2e_s)

    def _publish_stats(self, stats: EngineStats, before: EngineStats) -> None:
        self._metrics["deepinfer_requests_running"].set(stats.num_running)
        self._metrics["deepinfer_requests_waiting"].set(stats.num_waiting)
        self._metrics["deepinfer_kv_cache_usage_ratio"].set(stats.num_used_blocks / max(1, stats.num_blocks))
        for name, increase in (
            ("deepinfer_prompt_tokens_total", stats.num_prompt_tokens - before.num_prompt_tokens),
            ("deepinfer_cached_prompt_tokens_total", stats.num_cached_tokens - before.num_cached_tokens),
            ("deepinfer_generation_tokens_total", stats.num_generation_tokens - before.num_generation_tokens),
            ("deepinfer_preemptions_total", stats.num_preemptions - before.num_preemptions),
        ):
            if increase > 0:
                self._metrics[name].increment(increase)

    def close(self) -> None:
        """Triton wants each metric gone before its family."""
        self._metrics.clear()
        self._families.clear()

    def _add(self, name: str, description: str, kind: Any, **options: Any) -> None:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        self._metrics[name] = family.Metric(labels=self._labels, **options)
