"""Whether requests are traced, and where their spans go. Only where they are is OpenTelemetry's library needed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_backend.errors import ConfigError
from deepinfer_backend.triton.model_config import read_json_object

if TYPE_CHECKING:
    from deepinfer_backend.triton.request_tracer import RequestTracer

TRACING_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


def read_trace_context(request: Any) -> str:
    """The context that spans of this InferenceRequest go on from, as JSON of the headers that carry it.

    "" when Triton does not trace the request with OpenTelemetry. Only to be called within `execute`; never raises.
    """
    try:
        return request.trace().get_context() or ""
    except Exception:  # a Triton that has no such methods, or whatever is wrong with a trace: the request goes on
        return ""


def start_tracer(otlp_traces_endpoint: str | None, model_name: str) -> RequestTracer | None:
    """None without an endpoint.

    Raises:
        ConfigError: OpenTelemetry's library is missing; names the command that installs it.
    """
    if otlp_traces_endpoint is None:
        return None
    try:
        from deepinfer_backend.triton.request_tracer import RequestTracer
    except ModuleNotFoundError as error:
        raise ConfigError(f"otlp_traces_endpoint is set, but there is no {error.name}: {TRACING_INSTALL}") from None
    return RequestTracer(otlp_traces_endpoint, model_name)


def find_traces_endpoint(model_repository: Path) -> str | None:
    """Where Triton must send its own spans, so that those of the models go on from them: Triton has one such place.

    The first that a model.json of the repository names; None where none does.
    """
    for path in sorted(model_repository.glob("*/*/model.json")):
        with suppress(ConfigError):  # the model itself will say what is wrong with it
            endpoint = read_json_object(path).get("otlp_traces_endpoint")
            if isinstance(endpoint, str):
                return endpoint
    return None
