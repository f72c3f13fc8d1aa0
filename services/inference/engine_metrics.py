"""The built-in engine's numbers under SGLang's metric names."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from headway.runtime.metrics import CollectorRegistry, bare_registry, families

if TYPE_CHECKING:
    from services.inference.builtin import BuiltinEngine


def registry_of(builtin: "BuiltinEngine") -> CollectorRegistry:
    """A registry with this engine's numbers, read when it is scraped."""
    return bare_registry(lambda: engine_metrics(builtin))


def engine_metrics(builtin: "BuiltinEngine") -> Iterable[Metric]:
    """The metrics of this moment."""
    engine, counters = builtin.engine, builtin.engine.counters
    numbers = {
        "num_running_reqs": engine.scheduler.num_running,
        "num_queue_reqs": len(engine.scheduler.waiting),
        "is_paused": int(engine.is_paused),
        "prompt_tokens_total": counters.prompt_tokens,
        "cached_tokens_total": counters.cached_tokens,
        "generation_tokens_total": counters.generation_tokens,
        "num_requests_total": counters.finished,
        "num_aborted_requests_total": counters.aborted,
        "num_retracted_requests_total": counters.retracted,
        "num_steps_total": counters.steps,
        "num_weight_updates_total": counters.weight_updates,
        "weight_load_duration_seconds_total": counters.weight_load_s,
    }
    model = builtin.served_model_name
    return families({f"sglang:{name}": {model: float(number)} for name, number in numbers.items()})
