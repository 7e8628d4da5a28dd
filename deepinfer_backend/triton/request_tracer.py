"""One span for each traced request that has ended, with a span for each of its phases, sent to a collector.

Names are those of OpenTelemetry's conventions for generative AI, and vLLM's where these have none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from deepinfer_backend.triton.generate_request import RequestSummary

logger = logging.getLogger(__name__)

_SERVICE_NAME = "deepinfer"
_REQUEST_SPAN = "llm_request"
_CLOSE_TIMEOUT_S = 1.0
_LOG_INTERVAL_S = 60.0

_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class _Phase(NamedTuple):
    """Part of a request's life; times in nanoseconds of CLOCK_MONOTONIC."""

    name: str
    latency_attribute: str
    start_ns: int
    end_ns: int


class RequestTracer:
    """Owns the thread that sends spans, from construction to `close`.

    Spans wait in a queue of bounded length; what a collector that is down or slow does not take in time is dropped.
    OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_BSP_SCHEDULE_DELAY, ...) apply.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        """`endpoint`: of OTLP over HTTP, with its path: http://localhost:4318/v1/traces."""
        _log_sparsely(endpoint)
        self._model_name = model_name
        # The environment's words come last: they win.
        resource = Resource.create({SERVICE_NAME: _SERVICE_NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("deepinfer_backend")

    def record_request(self, request: RequestSummary) -> None:
        """A RequestObserver. Does nothing for a request that is not traced."""
        parent = _read_context(request.trace_context)
        if parent is None:
            return
        unix_ns = time.time_ns() - time.monotonic_ns()  # what a time of CLOCK_MONOTONIC lacks
        phases = list(_phases(request))
        span = self._tracer.start_span(
            _REQUEST_SPAN,
            parent,
            SpanKind.SERVER,
            self._attributes(request, phases),
            start_time=unix_ns + request.arrival_time_ns,
        )
        within_request = set_span_in_context(span, parent)
        for phase in phases:
            child = self._tracer.start_span(phase.name, within_request, start_time=unix_ns + phase.start_ns)
            child.end(unix_ns + phase.end_ns)
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(request.error)))
        span.end(unix_ns + request.end_time_ns)

    def close(self) -> None:
        """Sends what is left; gives up after one second."""
        # OpenTelemetry's own waits up to 30 s for a collector that is down.
        closing = threading.Thread(target=self._provider.shutdown, name="deepinfer-tracer-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _attributes(self, request: RequestSummary, phases: list[_Phase]) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.latency.e2e": (request.end_time_ns - request.arrival_time_ns) / 1e9,
            **{phase.latency_attribute: (phase.end_ns - phase.start_ns) / 1e9 for phase in phases},
        }
        if request.num_prompt_tokens:  # else it ended before they were counted
            attributes["gen_ai.usage.input_tokens"] = request.num_prompt_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = request.num_cached_tokens
            attributes["gen_ai.usage.output_tokens"] = request.num_output_tokens
        if request.first_token_time_ns:
            time_ns = request.first_token_time_ns - request.arrival_time_ns
            attributes["gen_ai.latency.time_to_first_token"] = time_ns / 1e9
        if request.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = request.finish_reasons
        if request.error is not None:
            attributes["error.type"] = request.error.word
        return attributes


def _read_context(trace_context: str) -> Context | None:
    """None where nothing can go on from it."""
    if not trace_context:
        return None
    try:
        context = TraceContextTextMapPropagator().extract(_decode_headers(trace_context))
    except msgspec.MsgspecError:
        return None
    return context if get_current_span(context).get_span_context().is_valid else None


def _phases(request: RequestSummary) -> Iterator[_Phase]:
    """Those whose beginning and end are known: a request that failed has perhaps not come to them."""
    for phase in (
        _Phase("queue", "gen_ai.latency.time_in_queue", request.arrival_time_ns, request.first_scheduled_time_ns),
        _Phase(
            "prefill",
            "gen_ai.latency.time_in_model_prefill",
            request.first_scheduled_time_ns,
            request.first_token_time_ns,
        ),
        _Phase(
            "decode", "gen_ai.latency.time_in_model_decode", request.first_token_time_ns, request.last_token_time_ns
        ),
    ):
        if 0 < phase.start_ns < phase.end_ns:
            yield phase


class _SparseLog(logging.Handler):
    """Passes on what OpenTelemetry's library says, at most one line a minute."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._next_s:
            self._next_s = record.created + _LOG_INTERVAL_S
            logger.warning("spans for %s: %s", self._endpoint, record.getMessage())


def _log_sparsely(endpoint: str) -> None:
    """The library writes several lines for each batch that a collector does not take."""
    library = logging.getLogger("opentelemetry")
    library.handlers = [_SparseLog(endpoint)]
    library.propagate = False
