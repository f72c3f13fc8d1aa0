"""What people watch while the run goes on: the stream of the status, the timeline, numbers over the steps, evaluations.

status --> StatusFeed --> /v1/events            journal --> PeopleStore --> /v1/metrics/history
fleet, waits, evaluations --> Recorder --+
trainer --> TrainerLink -----------------+--> Timeline --> /v1/timeline
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from headway.runtime.names import NameClient
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.evaluations import EvaluationRecord, Evaluations
from services.rollout_controller.events import StatusFeed
from services.rollout_controller.fleet import Fleet
from services.rollout_controller.people_store import PeopleStore, people_store
from services.rollout_controller.problems import responses
from services.rollout_controller.status import Status, evaluation_status
from services.rollout_controller.timeline import Recorder, Timeline
from services.rollout_controller.trainer_link import TrainerLink, trainer_link
from services.rollout_controller.views import (
    EvaluationResult,
    EvaluationRun,
    MetricsHistory,
    Series,
    TimelineView,
)
from services.rollout_controller.views import Evaluations as EvaluationsView

MAX_STEPS = 10_000
"""Steps of one page of the history."""


@dataclass(frozen=True)
class Live:
    """Where the answers come from."""

    feed: StatusFeed
    timeline: Timeline
    trainer: TrainerLink
    people: PeopleStore
    evaluations: Evaluations


@asynccontextmanager
async def open_live(
    status: Status,
    controller: RolloutController,
    fleet: Fleet,
    waits: Waits,
    names: NameClient,
    supervisor: Supervisor,
    journal: Path,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Live]:
    """Watch the run until the block is left.

    Args:
        journal: The journal's file; it exists.
    """
    timeline, evaluations = Timeline(), controller.evaluations
    recorder = Recorder(timeline, lambda: fleet.snapshot().engines, evaluations.running.values, waits.snapshot)
    feed = StatusFeed(lambda: status.status(clock()))
    async with AsyncExitStack() as stack:
        people = await stack.enter_async_context(people_store(journal))
        trainer = await stack.enter_async_context(trainer_link(names, timeline))
        stack.callback(feed.close)
        fleet.on_change = recorder.look_at_engines
        for what, work in (
            ("record the timeline", recorder.run()),
            ("look at the trainer", trainer.run()),
            ("tell the status", feed.run()),
        ):
            stack.callback(supervisor.start(what, work).cancel)
        yield Live(feed, timeline, trainer, people, evaluations)


def live_router(live: Live) -> APIRouter:
    """The routes; whoever mounts them says who may call."""
    router = APIRouter(prefix="/v1", tags=["watching"])

    @router.get(
        "/events",
        summary="The status as server-sent events, whenever something has changed",
        response_class=StreamingResponse,
        responses={**responses(429), 200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def get_events() -> StreamingResponse:
        return StreamingResponse(
            live.feed.listen(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    @router.get("/timeline", summary="What engines, the trainer and evaluations did lately")
    async def get_timeline(
        since: Annotated[float, Query(description="Unix seconds: spans that ended earlier are left out.")] = 0.0,
    ) -> TimelineView:
        return live.timeline.view(time.time(), since)

    @router.get("/metrics/history", summary="Numbers over the steps")
    async def get_history(
        name: Annotated[Sequence[str], Query(description="Those that are wanted.", max_length=200)] = (),
        since_step: Annotated[int, Query(ge=0, lt=1 << 62, description="Completed steps from which on.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = MAX_STEPS,
    ) -> MetricsHistory:
        return history_of(await live.people.statistics(max(0, since_step - 1), limit + 1), name, limit)

    @router.get("/evaluations", summary="Evaluations that run, and those that have ended")
    async def get_evaluations() -> EvaluationsView:
        return evaluations_of(live.evaluations, time.time())

    return router


def history_of(steps: Sequence[tuple[int, dict[str, float]]], names: Sequence[str], limit: int) -> MetricsHistory:
    """A page of `limit` steps; one more that is given says where the next begins."""
    shown = steps[:limit]
    series = {name: [(step + 1, stats[name]) for step, stats in shown if name in stats] for name in names}
    return MetricsHistory(
        names=sorted({name for _, stats in shown for name in stats}),
        series=[Series(name=name, points=points) for name, points in series.items() if points],
        next_step=steps[limit][0] + 1 if len(steps) > limit else None,
    )


def evaluations_of(evaluations: Evaluations, now: float) -> EvaluationsView:
    """Both lists, oldest first."""
    running = [
        EvaluationRun(
            version=one.version.label,
            step=one.version.step,
            num_tasks=one.num_tasks,
            num_done=one.num_ended,
            since_s=max(0.0, now - one.began_at),
        )
        for one in evaluations.running.values()
    ]
    return EvaluationsView(running=running, ended=[_result(one) for one in evaluations.history])


def _result(record: EvaluationRecord) -> EvaluationResult:
    return EvaluationResult(
        **evaluation_status(record).model_dump(), began_at=record.began_at, ended_at=record.ended_at or record.began_at
    )
