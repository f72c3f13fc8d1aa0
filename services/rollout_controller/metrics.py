"""The controller's metrics for Prometheus, read from its account at each scrape."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.core.ledger import TaskState
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.status import staleness_status


class ControllerMetrics(Collector):
    """Reads the account when it is asked; nothing is counted twice."""

    def __init__(self, controller: RolloutController) -> None:
        self._controller = controller

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        ledger, production = self._controller.ledger, self._controller.production
        staleness = staleness_status(self._controller)
        tasks = GaugeMetricFamily("headway_tasks", "Tasks by state; they add up to submitted.", labels=["state"])
        for state in TaskState:
            tasks.add_metric([state.value], ledger.counts[state])
        ends = CounterMetricFamily("headway_rollouts", "Rollouts by how they ended.", labels=["outcome"])
        for outcome, count in production.num_outcomes.items():
            ends.add_metric([outcome.value], count)
        spent = CounterMetricFamily("headway_rollout_seconds", "Time of accepted groups by phase.", labels=["phase"])
        for phase in ("pending", "rollout", "generate", "reward", "journal"):
            spent.add_metric([phase], getattr(production.timing, f"{phase}_s"))
        yield GaugeMetricFamily("headway_tasks_submitted", "Tasks taken up.", ledger.num_submitted)
        yield tasks
        yield ends
        yield spent
        yield GaugeMetricFamily(
            "headway_staleness_outstanding", "Groups started and not trained on.", staleness.outstanding
        )
        yield GaugeMetricFamily("headway_staleness_limit", "How many may be outstanding.", staleness.limit)
        yield GaugeMetricFamily(
            "headway_served_step", "Newest step that the whole fleet has served.", staleness.served_step
        )
        yield GaugeMetricFamily(
            "headway_open_waits", "Things that are waited for.", len(self._controller.waits.snapshot())
        )
