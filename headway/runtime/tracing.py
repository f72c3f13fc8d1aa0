"""Spans of OpenTelemetry, over gRPC and HTTP, where `rollout.enable_rollout_tracing` asks for them.

    rollout (task) -> episode (sample) -> generate -> POST /generate -> the engine's span
                                       -> reward   -> Reward/Score   -> the reward service's span

Pieces and items of several samples travel in one call: its span is a child of the first one's, and linked to the
others. Where the spans go is said by the environment, as OpenTelemetry specifies: OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_PROTOCOL (`http/protobuf` or `grpc`), OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and so on.
Spans are sent from a thread of the SDK, which drops them, and says so, when the collector does not keep up.

Off, nothing of OpenTelemetry is imported, and a span costs no more than a `with` block.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headway.errors import InvalidInput

Attributes = Mapping[str, str | int | float | bool]
Note = Callable[[str, str | int | float | bool], None]
"""Adds an attribute to a span."""
PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HEADER = "traceparent"
LAST_SENDING_S = 2.0
"""A process that ends may be killed after a few seconds more."""
log = logging.getLogger(__name__)
_tracer: Any = None
"""Of the process; None: off."""


@contextmanager
def tracing(is_on: bool, service: str, instance: str = "0", run_name: str = "") -> Iterator[None]:
    """Make spans, and send them, while the block runs. Leaving it sends the rest: it blocks, up to `LAST_SENDING_S`.

    Raises:
        InvalidInput: OpenTelemetry is not installed, or the environment asks for an unknown protocol.
    """
    global _tracer
    if not is_on:
        yield
        return
    provider, exporter = _provider(
        {"service.name": f"headway-{service}", "service.instance.id": instance, "headway.run": run_name}
    )
    _tracer = provider.get_tracer("headway")
    try:
        yield
    finally:
        _tracer = None
        _send_the_rest(provider, exporter)


def _send_the_rest(provider: Any, exporter: Any) -> None:
    """The SDK itself would try for half a minute."""
    sending = threading.Thread(target=provider.shutdown, name="send the last spans", daemon=True)
    sending.start()
    sending.join(LAST_SENDING_S)
    if sending.is_alive():
        log.warning("the last spans could not be sent within %g s", LAST_SENDING_S)
        exporter.shutdown()


def is_tracing() -> bool:
    """Whether spans are made in this process."""
    return _tracer is not None


def _provider(resource: Attributes) -> tuple[Any, Any]:
    """The SDK's provider, and what sends its spans.

    Raises:
        InvalidInput: As `tracing`.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter()
    except ImportError as error:
        raise InvalidInput(
            f"rollout.enable_rollout_tracing needs OpenTelemetry: pip install 'headway[tracing]' ({error})"
        ) from error
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def _exporter() -> Any:
    protocol = next((value for name in PROTOCOL if (value := os.environ.get(name))), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    raise InvalidInput(f"{PROTOCOL[1]} is {protocol!r}; spans are sent as http/protobuf or grpc")


def _note_nothing(name: str, value: str | int | float | bool) -> None:
    pass


@contextmanager
def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    calls_out: bool = False,
    parent: Any = None,
    links: Iterable[Any] = (),
) -> Iterator[Note]:
    """A span for as long as the block runs; spans made in it are its children.

    Args:
        calls_out: It is the caller's side of a call to another process.
        parent: What `current_span` gave somewhere else; None: the current span.
        links: The same, of other spans that it works for.
    """
    if _tracer is None:
        yield _note_nothing
        return
    from opentelemetry import trace

    context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
    kind = trace.SpanKind.CLIENT if calls_out else trace.SpanKind.INTERNAL
    linked = [trace.Link(link) for link in links if link is not None]
    with _tracer.start_as_current_span(name, context, kind, attributes, linked) as made:
        yield made.set_attribute


def current_span() -> Any:
    """Names the current span for `parent` and `links`; None: there is none."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return context if context.is_valid else None


def trace_headers() -> dict[str, str]:
    """Headers of a call that tell the other side which span it belongs to."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


@contextmanager
def served_span(name: str, headers: Callable[[], Iterable[tuple[Any, Any]] | None]) -> Iterator[Note]:
    """The span of a call that this process answers, where the caller has one.

    It does not become the current span: the generator of a streamed answer may be closed from another task.
    """
    given = {_text(key).lower(): _text(value) for key, value in headers() or ()} if _tracer is not None else {}
    if HEADER not in given:
        yield _note_nothing
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    made = _tracer.start_span(name, TraceContextTextMapPropagator().extract(given), trace.SpanKind.SERVER)
    try:
        yield made.set_attribute
    except Exception as error:  # whatever the call ends with belongs on its span; it is raised again
        made.record_exception(error)
        made.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        raise
    finally:
        made.end()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
