"""A collector of OpenTelemetry spans for tests: takes them over OTLP (HTTP, protobuf) and keeps them.

with TraceCollector() as collector:          # collector.url is OTEL_EXPORTER_OTLP_ENDPOINT
    ...
collector.spans
"""

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class CollectedSpan:
    """One span, as it arrived."""

    name: str
    kind: int
    """Of OTLP: 1 internal, 2 server, 3 client."""
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Empty: it is a root."""
    links: tuple[bytes, ...]
    """Ids of the spans that it is linked to."""
    attributes: dict[str, Any]
    service: str


class TraceCollector:
    """Serves in a thread while the block runs."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.spans += _spans_of(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                """Nothing."""

        return Handler


def _spans_of(request: Any) -> list[CollectedSpan]:
    return [
        CollectedSpan(
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_span_id,
            links=tuple(link.span_id for link in span.links),
            attributes=_attributes(span.attributes),
            service=_attributes(resource.resource.attributes)["service.name"],
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
