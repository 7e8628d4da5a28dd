"""An OpenTelemetry collector for tests: takes OTLP over HTTP, in protobuf and in JSON, and keeps the spans."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

_PATH = "/v1/traces"


@dataclass(frozen=True)
class CollectedSpan:
    """Ids in hexadecimal; times in nanoseconds since 1970. `error`: the description of an error status, None: none."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


class TraceCollector:
    """Listens from construction to `close`, but for the time within `down`."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []  # appended to by the handlers' threads
        self._server = self._listen(0)
        self.port = int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.port}{_PATH}"

    @property
    def num_spans(self) -> int:
        return len(self._spans)

    def spans(self, trace_id: str) -> dict[str, CollectedSpan]:
        """What has come of a trace, by name."""
        return {span.name: span for span in list(self._spans) if span.trace_id == trace_id}

    @contextmanager
    def down(self) -> Iterator[None]:
        """Connections are refused."""
        self.close()
        try:
            yield
        finally:
            self._server = self._listen(self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _listen(self, port: int) -> ThreadingHTTPServer:
        spans = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                known = self.path == _PATH
                if known:
                    is_json = self.headers["Content-Type"] == "application/json"
                    spans.extend(_read_json(body) if is_json else _read_protobuf(body))
                self.send_response(200 if known else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("localhost", port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


def _read_protobuf(body: bytes) -> Iterator[CollectedSpan]:
    for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _attributes(resource_spans.resource.attributes)["service.name"]
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                is_error = span.status.code == Status.STATUS_CODE_ERROR
                yield CollectedSpan(
                    service,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    span.status.message if is_error else None,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    if value.HasField("array_value"):
        return [_value(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))


def _read_json(body: bytes) -> Iterator[CollectedSpan]:
    """As Triton sends them; of its attributes, none."""
    for resource_spans in json.loads(body)["resourceSpans"]:
        attributes = {pair["key"]: pair["value"] for pair in resource_spans["resource"]["attributes"]}
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                yield CollectedSpan(
                    attributes["service.name"]["stringValue"],
                    span["traceId"],
                    span["spanId"],
                    span.get("parentSpanId", ""),
                    span["name"],
                    int(span["startTimeUnixNano"]),
                    int(span["endTimeUnixNano"]),
                    {},
                    None,
                )
