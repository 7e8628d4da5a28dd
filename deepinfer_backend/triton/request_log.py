"""One line in the log for each request that has ended."""

from __future__ import annotations

import logging

from deepinfer_backend.triton.generate_request import RequestSummary

logger = logging.getLogger(__name__)


def log_request(request: RequestSummary) -> None:
    """A RequestObserver."""
    end = ",".join(request.finish_reasons) if request.error is None else str(request.error)
    logger.info(
        "request %s: %s; %d prompt tokens (%d cached), %d output tokens; queued %s, first token %s, total %s",
        request.request_id,
        end,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        request.num_output_tokens,
        _seconds_since_arrival(request, request.first_scheduled_time_ns),
        _seconds_since_arrival(request, request.first_token_time_ns),
        _seconds_since_arrival(request, request.end_time_ns),
    )


def _seconds_since_arrival(request: RequestSummary, time_ns: int) -> str:
    return f"{(time_ns - request.arrival_time_ns) / 1e9:.3f} s" if time_ns else "-"
