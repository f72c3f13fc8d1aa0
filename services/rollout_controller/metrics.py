"""The controller's metrics for Prometheus: its status of the moment, under the names of the table."""

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from headway.core.version import PolicyVersion
from headway.runtime.metrics import CollectorRegistry, Value, families, registry
from headway.runtime.metrics_table import CONTROLLER, ROLLOUT_PHASES
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.records import Timing
from services.rollout_controller.status import ControllerStatus, ServerStatus, Status

NONE = -1


def controller_registry(status: Status, controller: RolloutController, clock: Callable[[], float]) -> CollectorRegistry:
    """What the controller shows at `/metrics`, read when it is asked."""

    def collect() -> Iterable[Metric]:
        return controller_metrics(status.status(clock()), controller.production.timing)

    return registry(CONTROLLER, status.run, controller.waits, collect)


def controller_metrics(status: ControllerStatus, timing: Timing) -> Iterable[Metric]:
    """The metrics of a moment."""
    return families(_tasks(status, timing) | _staleness(status) | _steps(status) | _servers(status.servers))


def _tasks(status: ControllerStatus, timing: Timing) -> dict[str, Value]:
    tasks = status.tasks.model_dump(exclude={"is_conserved", "submitted"})
    return {
        "headway_tasks": tasks,
        "headway_tasks_submitted": status.tasks.submitted,
        "headway_rollouts_total": status.num_rollouts,
        "headway_discards_total": {reason: discard.count for reason, discard in status.discards.items()},
        "headway_groups_total": timing.num,
        "headway_rollout_seconds_total": {phase: getattr(timing, f"{phase}_s") for phase in ROLLOUT_PHASES},
    }


def _staleness(status: ControllerStatus) -> dict[str, Value]:
    staleness, tokens = status.staleness, status.tokens
    return {
        "headway_staleness_bound": staleness.eta,
        "headway_staleness_outstanding": staleness.outstanding,
        "headway_staleness_limit": staleness.limit,
        "headway_staleness_capacity": staleness.capacity,
        "headway_trained_tokens_total": {str(age): count for age, count in tokens.gradient.items()},
        "headway_masked_tokens_total": {str(age): count for age, count in tokens.masked.items()},
    }


def _steps(status: ControllerStatus) -> dict[str, Value]:
    served = status.staleness.served_step
    kinds = [service.name.partition("/")[0] for service in status.services]
    return {
        "headway_steps_total": status.num_steps,
        "headway_batch_wait_seconds_total": status.waited_s,
        "headway_run_ended": status.has_ended,
        "headway_published_step": _step_of(status.published_version),
        "headway_served_step": NONE if served is None else served,
        "headway_services": {kind: kinds.count(kind) for kind in ("trainer", "reward", "inference")},
        "headway_requests_waiting": status.requests_waiting,
    }


def _servers(servers: list[ServerStatus]) -> dict[str, Value]:
    states = [server.state for server in servers]
    return {
        "headway_servers": {state: states.count(state) for state in states},
        "headway_server_step": {server.name: _step_of(server.served_version) for server in servers},
        "headway_server_requests": {server.name: server.num_requests for server in servers},
        "headway_server_tokens": {server.name: server.tokens_in_flight for server in servers},
        "headway_server_busy_seconds_total": {server.name: server.busy_s for server in servers},
    }


def _step_of(label: str | None) -> int:
    return NONE if label is None else PolicyVersion.parse(label).step
