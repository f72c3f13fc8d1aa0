"""Prometheus metrics of one process: families made from the table, collected when they are scraped, served as text.

    status of the service --collector--> family(name, values) --> registry --expose--> GET /metrics

A collector is a function without state that reads the service's own account: nothing is counted twice, and nothing is
shown that is not in the table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import headway
from headway.runtime.grpc_calls import CALLS
from headway.runtime.metrics_table import BY_NAME, LATENCY_BUCKETS_S, Kind
from headway.runtime.waits import Waits

__all__ = [
    "CONTENT_TYPE_LATEST",
    "CollectorRegistry",
    "Latency",
    "bare_registry",
    "expose",
    "families",
    "family",
    "info",
    "registry",
]
Collect = Callable[[], Iterable[Metric]]
Value = float | Mapping[str, float] | Mapping[tuple[str, str], float]


def expose(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(registry)


def family(name: str, value: Value) -> Metric:
    """A gauge or counter of the table with its values of this moment.

    Args:
        name: As in the table.
        value: A number; or numbers by the value of the only label, or by the values of all labels in their order.

    Example:
        >>> [sample.value for sample in family("headway_staleness_limit", 8).samples]
        [8.0]
    """
    spec = BY_NAME[name]
    make = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    made = make(spec.family, spec.help, labels=spec.labels)
    if not isinstance(value, Mapping):
        made.add_metric([], float(value))
        return made
    shown: dict[Any, float] = dict.fromkeys(spec.values, 0.0) | dict(value)
    for labels, number in shown.items():
        made.add_metric(_label_values(labels), float(number))
    return made


def _label_values(labels: str | tuple[str, ...]) -> Sequence[str]:
    return [labels] if isinstance(labels, str) else labels


def families(values: Mapping[str, Value]) -> Iterable[Metric]:
    """Several of them."""
    return (family(name, value) for name, value in values.items())


def info(name: str, *values: str) -> Metric:
    """An info of the table: texts by its labels, in their order."""
    spec = BY_NAME[name]
    made = InfoMetricFamily(spec.family, spec.help)
    made.add_metric([], dict(zip(spec.labels, values, strict=True)))
    return made


class Latency:
    """How long something took, by label: counts in buckets, and the sum.

    Example:
        >>> latency = Latency()
        >>> latency.add("exact", 0.002)
        >>> latency.mean_s("exact")
        0.002
    """

    def __init__(self, bounds_s: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self._bounds_s = bounds_s
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def add(self, label: str, seconds: float) -> None:
        counts = self._counts.setdefault(label, [0] * (len(self._bounds_s) + 1))
        counts[next((i for i, bound in enumerate(self._bounds_s) if seconds <= bound), -1)] += 1
        self._sums_s[label] = self._sums_s.get(label, 0.0) + seconds

    def mean_s(self, label: str) -> float:
        """0 when there were none."""
        return self._sums_s.get(label, 0.0) / max(1, sum(self._counts.get(label, ())))

    def family(self, name: str) -> Metric:
        """As a histogram of the table with one label."""
        spec = BY_NAME[name]
        made = HistogramMetricFamily(spec.family, spec.help, labels=spec.labels)
        for label, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip([*map(str, self._bounds_s), "+Inf"], counts, strict=True):
                total += count
                buckets.append((bound, total))
            made.add_metric([label], buckets, self._sums_s[label])
        return made


class _Collected(Collector):
    """A function as a collector."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def registry(service: str, run_name: str, waits: Waits | None, *collectors: Collect) -> CollectorRegistry:
    """What a service shows: its own metrics, and those that every service has."""
    made = bare_registry(lambda: _common(service, run_name, waits or Waits()), *collectors)
    ProcessCollector(registry=made)
    return made


def bare_registry(*collectors: Collect) -> CollectorRegistry:
    """Some metrics, without those of every service."""
    made = CollectorRegistry()
    for collect in collectors:
        made.register(_Collected(collect))
    return made


def _common(service: str, run_name: str, waits: Waits) -> Iterable[Metric]:
    open_waits = waits.snapshot()
    yield info("headway_build_info", headway.__version__, service, run_name)
    yield family("headway_waits", len(open_waits))
    yield family("headway_oldest_wait_seconds", max((wait.since_s for wait in open_waits), default=0.0))
    yield family("headway_grpc_calls_total", CALLS.num)
    yield family("headway_grpc_seconds_total", CALLS.seconds)
