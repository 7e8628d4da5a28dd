"""How metrics are told to Triton: in bounded time, completely, and a fair sample of what is too many to tell."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

from deepinfer_backend.engine.messages import EngineStats
from deepinfer_backend.errors import (
    DeepInferError,
    EngineDeadError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
)
from deepinfer_backend.triton.generate_request import RequestSummary
from deepinfer_backend.triton.metric_families import MAX_TOKEN_GAPS, counted_as
from tests.support.fake_triton import MetricFamily

from deepinfer_backend.triton.metrics import ModelMetrics  # isort: skip (after fake_triton)

VALUE_S = 0.001  # of the slow Triton, for one value
CANCEL_LIMIT_S = 0.1  # what the README promises
ANSWERED = RequestSummary(
    request_id="r",
    trace_context="",
    num_prompt_tokens=10,
    num_cached_tokens=0,
    num_output_tokens=3,
    arrival_time_ns=1_000_000_000,
    first_scheduled_time_ns=1_100_000_000,
    first_token_time_ns=1_300_000_000,
    last_token_time_ns=1_700_000_000,
    end_time_ns=1_800_000_000,
    finish_reasons=("length",),
    error=None,
    time_per_output_token_s=0.2,
)


@pytest.fixture
def metrics() -> ModelMetrics:
    return ModelMetrics("model", "1")


def told(name: str) -> list[float]:
    return MetricFamily.values[f"deepinfer_{name}"]


def test_a_slow_triton_holds_up_nobody_and_is_told_everything(
    metrics: ModelMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_observe(self: MetricFamily, value: float) -> None:
        time.sleep(VALUE_S)
        self.increment(value)

    monkeypatch.setattr(MetricFamily, "observe", slow_observe)
    for _ in range(100):  # 800 values
        metrics.record_request(ANSWERED)
    has_more, num_calls, longest_s = True, 0, 0.0
    while has_more:
        started_s = time.monotonic()
        has_more = metrics.publish()
        longest_s = max(longest_s, time.monotonic() - started_s)
        num_calls += 1
    assert longest_s < CANCEL_LIMIT_S / 2
    assert num_calls > 10
    assert told("requests_total") == [100]  # not held up by the rest
    assert told("e2e_request_latency_seconds") == pytest.approx([0.8] * 100)


def test_a_requests_times_are_told_apart(metrics: ModelMetrics) -> None:
    metrics.record_request(ANSWERED)
    assert not metrics.publish()
    seconds = {
        "time_to_first_token_seconds": 0.3,
        "time_per_output_token_seconds": 0.2,
        "request_queue_time_seconds": 0.1,
        "request_prefill_time_seconds": 0.2,
        "request_decode_time_seconds": 0.4,
        "e2e_request_latency_seconds": 0.8,
    }
    assert {name: told(name) for name in seconds} == {name: [pytest.approx(s)] for name, s in seconds.items()}


def test_what_an_answer_does_not_have_is_not_told(metrics: ModelMetrics) -> None:
    metrics.record_request(replace(ANSWERED, num_output_tokens=0, time_per_output_token_s=None))  # an embedding
    metrics.record_request(replace(ANSWERED, finish_reasons=(), error=RequestCancelledError("left")))
    metrics.publish()
    assert len(told("e2e_request_latency_seconds")) == len(told("request_prefill_time_seconds")) == 1
    for name in ("time_to_first_token_seconds", "request_decode_time_seconds", "request_generation_tokens"):
        assert told(name) == []


def test_times_between_tokens_are_a_bounded_sample_without_a_bias(metrics: ModelMetrics) -> None:
    num_rounds, num_tokens = 200, 1000
    for _ in range(num_rounds):
        for place in range(num_tokens // 2):
            metrics.record_tokens(2, place)  # two tokens in one message have half its time each
        while metrics.publish():
            pass
    sample = told("inter_token_latency_seconds")
    assert len(sample) == num_rounds * MAX_TOKEN_GAPS
    # Uniform over 0 to 499: the mean of 12,800 has a standard deviation of 1.3, a quarter's count one of 50.
    assert fmean(sample) == pytest.approx(249.5, abs=8)
    quarters = Counter(int(value // 125) for value in sample)
    assert all(abs(count - len(sample) / 4) < 300 for count in quarters.values())


def test_few_tokens_are_all_told(metrics: ModelMetrics) -> None:
    for gap in range(5):
        metrics.record_tokens(1, gap)
    metrics.record_tokens(0, 9.0)
    metrics.publish()
    assert told("inter_token_latency_seconds") == [0, 1, 2, 3, 4]


def test_the_hit_ratio_is_that_of_recent_requests(metrics: ModelMetrics) -> None:
    for num_cached in [10] * 10 + [0] * 500 + [5] * 500:
        metrics.record_request(replace(ANSWERED, num_cached_tokens=num_cached))
    while metrics.publish():
        pass
    assert told("prefix_cache_hit_ratio")[-1] == pytest.approx(0.25)


def test_gauges_of_a_dead_engine_are_zero_and_its_counts_stay(metrics: ModelMetrics) -> None:
    metrics.record_stats(0, EngineStats(num_running=3, num_generation_tokens=10, num_steps=2))
    metrics.publish()
    metrics.record_stats(0, EngineStats(num_running=2, num_generation_tokens=12, num_steps=3))
    metrics.record_engine_death(0)
    metrics.publish()
    assert told("requests_running") == [3, 0]
    assert sum(told("generation_tokens_total")) == 12
    # More steps than the dead one ever made, before anybody looked.
    metrics.record_stats(0, EngineStats(num_running=1, num_generation_tokens=50, num_steps=90))
    metrics.publish()
    assert sum(told("generation_tokens_total")) == 62


@pytest.mark.parametrize(
    ("finish_reasons", "error", "counted"),
    [
        (("stop",), None, {"requests": "stop"}),
        (("stop", "length", "stop"), None, {"requests": "length"}),
        ((), None, {}),  # it asked for the end of another
        ((), InvalidRequestError("x"), {"requests": "rejected", "requests_rejected": "invalid_arg"}),
        ((), UnavailableError("x", reason="queue_full"), {"requests": "rejected", "requests_rejected": "queue_full"}),
        (("stop",), RequestCancelledError("x", reason="a"), {"requests": "cancelled", "requests_cancelled": "a"}),
        ((), EngineDeadError("x"), {"requests": "error"}),
    ],
)
def test_a_request_is_counted_by_how_it_ended(
    finish_reasons: tuple[str, ...], error: DeepInferError | None, counted: dict[str, str]
) -> None:
    found = counted_as(replace(ANSWERED, finish_reasons=finish_reasons, error=error))
    assert {family.name: value for family, value in found} == {
        f"deepinfer_{name}_total": value for name, value in counted.items()
    }
