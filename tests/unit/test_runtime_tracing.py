"""Tracing that is off costs nothing and imports nothing; on, it runs or says what it lacks."""

import subprocess
import sys

import pytest

from headway.errors import InvalidInput
from headway.runtime.tracing import is_tracing, served_span, span, tracing


def test_off_it_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys\n"
        "from headway.runtime.tracing import current_span, served_span, span, trace_headers, tracing\n"
        "with tracing(False, 'x'), span('a') as note, served_span('b', lambda: [('traceparent', '00-1-1-01')]):\n"
        "    note('x', 1)\n"
        "    assert trace_headers() == {} and current_span() is None\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_on_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(InvalidInput, match=r"pip install 'headway\[tracing\]'"):
        with tracing(True, "controller"):
            pass
    assert not is_tracing()


def test_a_protocol_that_nothing_speaks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(InvalidInput, match="http/json"):
        with tracing(True, "controller"):
            pass


def test_a_call_without_a_caller_to_continue_is_no_span() -> None:
    with served_span("GET /", lambda: None) as note:
        note("status", 200)
    with span("a") as note:
        note("x", 1)
