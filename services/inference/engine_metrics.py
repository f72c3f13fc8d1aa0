"""The built-in engine's numbers under SGLang's metric names."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.runtime.metrics import CollectorRegistry

if TYPE_CHECKING:
    from services.inference.builtin import BuiltinEngine


class EngineCollector(Collector):
    """Reads the engine when it is scraped."""

    def __init__(self, builtin: "BuiltinEngine") -> None:
        self._builtin = builtin

    def collect(self) -> Iterator[Metric]:
        engine, counters = self._builtin.engine, self._builtin.engine.counters
        table = engine.scheduler.table
        for name, text, value in (
            ("num_running_reqs", "Requests in a slot", table.num_running),
            ("num_queue_reqs", "Requests that wait for a slot", len(engine.scheduler.waiting)),
            ("is_paused", "1 while generation is paused", int(engine.is_paused)),
        ):
            yield self._metric(GaugeMetricFamily, name, text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens received", counters.prompt_tokens),
            ("cached_tokens", "Prompt tokens whose keys and values were reused", counters.cached_tokens),
            ("generation_tokens", "Tokens generated", counters.generation_tokens),
            ("num_requests", "Requests finished", counters.finished),
            ("num_aborted_requests", "Requests aborted", counters.aborted),
            ("num_retracted_requests", "Requests put back into the queue by a pause", counters.retracted),
            ("num_steps", "Forward passes", counters.steps),
            ("num_weight_updates", "Weight updates applied", counters.weight_updates),
        ):
            yield self._metric(CounterMetricFamily, name, text, value)
        load_s = counters.weight_load_s
        yield self._metric(CounterMetricFamily, "weight_load_duration_seconds", "Time spent on weight updates", load_s)

    def _metric(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"sglang:{name}", text, labels=["model_name"])
        family.add_metric([self._builtin.served_model_name], value)
        return family


def registry_of(builtin: "BuiltinEngine") -> CollectorRegistry:
    """A registry with this engine's numbers."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(builtin))
    return registry
