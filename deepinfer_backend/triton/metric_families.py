"""What the metrics endpoint shows: every family with its kind, its label and where its values come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

from deepinfer_backend.engine.messages import EngineStats
from deepinfer_backend.errors import InvalidRequestError, RequestCancelledError, UnavailableError
from deepinfer_backend.speculative_config import MAX_SPECULATIVE_TOKENS
from deepinfer_backend.triton.generate_request import RequestSummary

MAX_TOKEN_GAPS = 64
"""Of the times between tokens, so many are told per publish interval."""

NUM_HIT_RATIO_REQUESTS = 1000

_REQUEST_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
_LENGTH_BUCKETS = tuple(float(2**power) for power in range(18))


class MetricKind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A name and its series. Besides `model` and `version` these have one label or none.

    `label_values`: those that are there from the start; the one series of a family without a label has the value "".
    `buckets`: upper limits, of a histogram.
    """

    name: str
    kind: MetricKind
    description: str
    label: str = ""
    label_values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFamily:
    """A gauge or a counter of an engine, told by the model that owns it; `series`: label value → how it is read."""

    family: MetricFamily
    series: Mapping[str, Callable[[EngineStats], float]]


@dataclass(frozen=True, slots=True)
class RequestHistogram:
    """A histogram with at most one value of each request that was answered in full; None: this one has no such."""

    family: MetricFamily
    value_of: Callable[[RequestSummary], float | None]


def _engine_gauge(name: str, description: str, read: Callable[[EngineStats], float]) -> EngineFamily:
    return EngineFamily(MetricFamily(name, MetricKind.GAUGE, description), {"": read})


def _engine_series(
    name: str, kind: MetricKind, description: str, label: str, series: Mapping[str, Callable[[EngineStats], float]]
) -> EngineFamily:
    return EngineFamily(MetricFamily(name, kind, description, label, tuple(series)), series)


def _engine_counter(name: str, description: str, read: Callable[[EngineStats], float]) -> EngineFamily:
    return EngineFamily(MetricFamily(name, MetricKind.COUNTER, description), {"": read})


def _histogram(
    name: str, description: str, buckets: tuple[float, ...], value_of: Callable[[RequestSummary], float | None]
) -> RequestHistogram:
    return RequestHistogram(MetricFamily(name, MetricKind.HISTOGRAM, description, buckets=buckets), value_of)


def _seconds(begin_ns: int, end_ns: int) -> float | None:
    """None if one of the two never happened."""
    return (end_ns - begin_ns) / 1e9 if begin_ns and end_ns else None


def _usage(stats: EngineStats) -> float:
    return stats.num_used_blocks / max(1, stats.num_blocks)


def _num_accepted_at(position: int, stats: EngineStats) -> int:
    counts = stats.num_accepted_by_position
    return counts[position] if position < len(counts) else 0


ENGINE_FAMILIES = (
    _engine_gauge("deepinfer_requests_running", "Sequences in the engine's running batch.", lambda s: s.num_running),
    _engine_gauge("deepinfer_requests_waiting", "Sequences that wait for their prefill.", lambda s: s.num_waiting),
    _engine_gauge("deepinfer_kv_cache_usage_ratio", "Share of KV-cache blocks in use, 0 to 1.", _usage),
    _engine_gauge("deepinfer_engines_running", "Of the model's engines, those that run.", lambda s: s.num_engines),
    _engine_counter("deepinfer_engine_starts_total", "Engines started, those again too.", lambda s: s.num_engines),
    _engine_counter("deepinfer_prompt_tokens_total", "Prompt tokens taken in.", lambda s: s.num_prompt_tokens),
    _engine_counter(
        "deepinfer_cached_prompt_tokens_total",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.num_cached_tokens,
    ),
    _engine_counter("deepinfer_generation_tokens_total", "Tokens generated.", lambda s: s.num_generation_tokens),
    _engine_counter(
        "deepinfer_preemptions_total",
        "Sequences that gave up their KV blocks to others.",
        lambda s: s.num_preemptions,
    ),
    _engine_counter(
        "deepinfer_draft_tokens_total", "Tokens proposed by speculative decoding.", lambda s: s.num_draft_tokens
    ),
    _engine_counter(
        "deepinfer_accepted_draft_tokens_total",
        "Proposed tokens that the model agreed to.",
        lambda s: s.num_accepted_draft_tokens,
    ),
    _engine_counter(
        "deepinfer_drafts_total",
        "How often a sequence's step verified proposed tokens; accepted ones by this, plus 1: tokens of such a step.",
        lambda s: s.num_drafts,
    ),
    _engine_series(
        "deepinfer_accepted_draft_tokens_by_position_total",
        MetricKind.COUNTER,
        "Proposed tokens that the model agreed to, by their place after the last token, from 0.",
        "position",
        {str(position): partial(_num_accepted_at, position) for position in range(MAX_SPECULATIVE_TOKENS)},
    ),
    # The names of TensorRT-LLM's backend: Triton's load-report header and the routers of gateways look for these.
    _engine_series(
        "nv_trt_llm_kv_cache_block_metrics",
        MetricKind.GAUGE,
        "KV-cache blocks; reused: found in the prefix cache since the engine started; fraction: used by max.",
        "kv_cache_block_type",
        {
            "max": lambda s: s.num_blocks,
            "free": lambda s: s.num_blocks - s.num_used_blocks,
            "used": lambda s: s.num_used_blocks,
            "tokens_per": lambda s: s.block_size,
            "reused": lambda s: s.num_cached_tokens // max(1, s.block_size),
            "fraction": _usage,
        },
    ),
    _engine_series(
        "nv_trt_llm_request_metrics",
        MetricKind.GAUGE,
        "Sequences; active and scheduled: in the running batch; max: the most that fit into it.",
        "request_type",
        {
            "active": lambda s: s.num_running,
            "max": lambda s: s.max_num_seqs,
            "scheduled": lambda s: s.num_running,
            "waiting": lambda s: s.num_waiting,
        },
    ),
)

REQUEST_HISTOGRAMS = (
    _histogram(
        "deepinfer_time_to_first_token_seconds",
        "From arrival to the first token.",
        _REQUEST_BUCKETS_S,
        lambda r: _seconds(r.arrival_time_ns, r.first_token_time_ns) if r.num_output_tokens else None,
    ),
    _histogram(
        "deepinfer_time_per_output_token_seconds",
        "A request's mean time from one token to the next.",
        _TOKEN_BUCKETS_S,
        lambda r: r.time_per_output_token_s,
    ),
    _histogram(
        "deepinfer_request_queue_time_seconds",
        "From arrival to the first step that computes the prompt.",
        _REQUEST_BUCKETS_S,
        lambda r: _seconds(r.arrival_time_ns, r.first_scheduled_time_ns),
    ),
    _histogram(
        "deepinfer_request_prefill_time_seconds",
        "From the first step that computes the prompt to the first token, or to the embedding.",
        _REQUEST_BUCKETS_S,
        lambda r: _seconds(r.first_scheduled_time_ns, r.first_token_time_ns),
    ),
    _histogram(
        "deepinfer_request_decode_time_seconds",
        "From the first token to the last.",
        _REQUEST_BUCKETS_S,
        lambda r: _seconds(r.first_token_time_ns, r.last_token_time_ns) if r.num_output_tokens else None,
    ),
    _histogram(
        "deepinfer_request_prompt_tokens",
        "A request's prompt length.",
        _LENGTH_BUCKETS,
        lambda r: r.num_prompt_tokens,
    ),
    _histogram(
        "deepinfer_request_generation_tokens",
        "Tokens generated for a request, all its sequences together.",
        _LENGTH_BUCKETS,
        lambda r: r.num_output_tokens or None,
    ),
    # The last: whoever sees a request in it sees all of the request.
    _histogram(
        "deepinfer_e2e_request_latency_seconds",
        "From arrival to the end of the answer.",
        _REQUEST_BUCKETS_S,
        lambda r: _seconds(r.arrival_time_ns, r.end_time_ns),
    ),
)

INTER_TOKEN_LATENCY = MetricFamily(
    "deepinfer_inter_token_latency_seconds",
    MetricKind.HISTOGRAM,
    f"From one token of a sequence to its next; a sample: at most {MAX_TOKEN_GAPS} random ones of each 0.25 s.",
    buckets=_TOKEN_BUCKETS_S,
)
PREFIX_CACHE_HIT_RATIO = MetricFamily(
    "deepinfer_prefix_cache_hit_ratio",
    MetricKind.GAUGE,
    f"Share of the prompt tokens of the last {NUM_HIT_RATIO_REQUESTS} answered requests that the prefix cache had.",
)
REQUESTS = MetricFamily(
    "deepinfer_requests_total",
    MetricKind.COUNTER,
    "Requests that ended, each counted once. stop: every sequence ended by itself; length: one or more at a limit; "
    "cancelled; rejected: wrong (INVALID_ARG) or not to be served now (UNAVAILABLE); error: a fault of the server.",
    "finish_reason",
    ("stop", "length", "error", "cancelled", "rejected"),
)
REJECTED_REQUESTS = MetricFamily(
    "deepinfer_requests_rejected_total",
    MetricKind.COUNTER,
    "Requests that were wrong (invalid_arg), or could not be served (queue_full, or unavailable for another reason).",
    "reason",
    ("invalid_arg", "queue_full", "unavailable"),
)
CANCELLED_REQUESTS = MetricFamily(
    "deepinfer_requests_cancelled_total",
    MetricKind.COUNTER,
    "Requests whose client cancelled or left, whose deadline passed, or that were ended by their id.",
    "reason",
    ("client", "timeout", "queue_timeout", "request_id"),
)

REQUEST_FAMILIES = (
    REQUESTS,
    REJECTED_REQUESTS,
    CANCELLED_REQUESTS,
    PREFIX_CACHE_HIT_RATIO,
    INTER_TOKEN_LATENCY,
    *(histogram.family for histogram in REQUEST_HISTOGRAMS),
)
"""Of a model's own requests: every model has these, whosever engine it uses."""

FAMILIES = (*(engine.family for engine in ENGINE_FAMILIES), *REQUEST_FAMILIES)


def is_answered(request: RequestSummary) -> bool:
    """Whether it got its whole answer; one that only asked for another's end has none."""
    return request.error is None and bool(request.finish_reasons)


def counted_as(request: RequestSummary) -> list[tuple[MetricFamily, str]]:
    """The counters that a request which has ended adds one to, each with its label's value."""
    match request.error:
        case None if not request.finish_reasons:
            return []
        case None:
            return [(REQUESTS, "length" if "length" in request.finish_reasons else "stop")]
        case InvalidRequestError() | UnavailableError() as error:
            return [(REQUESTS, "rejected"), (REJECTED_REQUESTS, error.reason)]
        case RequestCancelledError() as error:
            return [(REQUESTS, "cancelled"), (CANCELLED_REQUESTS, error.reason)]
        case _:
            return [(REQUESTS, "error")]
