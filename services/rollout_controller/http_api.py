"""The controller's door for people: JSON (documented at `/docs`) and metrics for Prometheus. Read only."""

import time
from collections.abc import Callable, Iterable

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.core.ledger import TaskState
from headway.runtime.metrics import CONTENT_TYPE_LATEST, expose
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.status import ControllerReport, ControllerStatus, Status, staleness_status


def make_http_api(
    status: Status, controller: RolloutController, clock: Callable[[], float] = time.monotonic
) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="Headway rollout controller", version="1", redoc_url=None)
    registry = CollectorRegistry()
    registry.register(ControllerMetrics(controller))

    @app.get("/v1/status", summary="What is going on, and what is waited for")
    async def get_status() -> ControllerStatus:
        return status.status(clock())

    @app.get("/v1/report", summary="The status with the history of all steps")
    async def get_report() -> ControllerReport:
        return await status.report(clock())

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def get_metrics() -> Response:
        return Response(expose(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health", summary="200 while the event loop answers")
    async def get_health() -> dict[str, str]:
        return {"status": "ok"}

    return app


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
