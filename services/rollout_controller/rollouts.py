"""Roll out one task: `n_samples` episodes of the workflow, ended in exactly one reason, with where the time went.

A group ends `accepted` with all its samples, or with the reason of the first failure; nothing that fails becomes a
reward. A rollout that neither generates nor scores for `stall_limit_s` has hung in the workflow's own code: it is
ended as workflow_error.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from headway.core.trajectory import Group, Outcome, Trajectory
from headway.runtime.rewards import scored_item
from headway.runtime.tracing import Attributes, span
from headway.runtime.wire import group_to_wire
from headway.v1 import types_pb2 as pb
from headway.workflow.api import InferenceEngine, ModelRequest, ModelResponse, RewardFunction, RolloutWorkflow
from headway.workflow.errors import outcome_of
from headway.workflow.group import AcceptFunction, GroupView, run_group
from services.rollout_controller.dumps import FinishedGroup
from services.rollout_controller.line_writer import Sink
from services.rollout_controller.sessions import GroupSessions, RecordedWorkflow, collect_sessions, note_phase


@dataclass(frozen=True, slots=True)
class TaskInput:
    """One dataset row to be rolled out."""

    task_id: str
    data_json: bytes


@dataclass(slots=True)
class Activity:
    """What the samples of one group do: time spent, summed over samples, in seconds."""

    clock: Callable[[], float]
    generate_s: float = 0.0
    reward_s: float = 0.0
    num_calls: int = 0
    """Calls that run now."""
    last_at: float = 0.0
    """When a call last began or ended."""


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """How a rollout ended."""

    outcome: Outcome
    message: str = ""
    group: pb.Group | None = None
    """The samples; only when accepted."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Gradient-carrying tokens by the step of the version that made them."""
    rollout_s: float = 0.0
    generate_s: float = 0.0
    """Time in generation, mean over the samples."""
    reward_s: float = 0.0
    """Time in rewards, mean over the samples."""


_activity: ContextVar[Activity] = ContextVar("activity")


class TimedEngine:
    """An engine that notes for the running group how long it generates."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def get_version(self) -> int:
        return self._engine.get_version()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        activity = _activity.get()
        began = _begin(activity)
        try:
            with span("generate", {"headway.rid": req.rid, "headway.prompt_tokens": len(req.input_ids)}) as note:
                response = await self._engine.agenerate(req)
                note("headway.tokens", response.output_len)
                note("headway.pieces", response.num_pieces)
                note("headway.stop_reason", response.stop_reason)
                return response
        finally:
            activity.generate_s += _end(activity, "generate", began)


def timed(reward_fn: RewardFunction) -> RewardFunction:
    """A reward function that notes for the running group how long it scores."""

    async def score(*args: Any, **kwargs: Any) -> float:
        activity = _activity.get()
        began = _begin(activity)
        try:
            with span("reward") as note:
                reward = await reward_fn(*args, **kwargs)
                note("headway.reward", reward)
                return reward
        finally:
            activity.reward_s += _end(activity, "reward", began)

    return score


def _begin(activity: Activity) -> float:
    activity.num_calls += 1
    activity.last_at = activity.clock()
    return activity.last_at


def _end(activity: Activity, phase: str, began: float) -> float:
    activity.num_calls -= 1
    activity.last_at = activity.clock()
    note_phase(phase, began, activity.last_at)
    return activity.last_at - began


@dataclass(frozen=True, slots=True)
class Records:
    """What is written of groups for people, beside what the trainer gets."""

    kind: str = "train"
    """`train` or `evaluation`."""
    groups: Sink[FinishedGroup] | None = None
    sessions: Sink[GroupSessions] | None = None


class GroupRunner:
    """Rolls out groups with one workflow on one engine.

    Args:
        stall_limit_s: How long a rollout may neither generate nor score.
        is_checked: Check the form of everything that the workflow returns.
        records: What is written of each group.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        num_samples: int,
        should_accept: AcceptFunction | None = None,
        stall_limit_s: float = 3600.0,
        is_checked: bool = False,
        records: Records | None = None,
    ) -> None:
        self._records = records or Records()
        self._workflow = workflow if self._records.sessions is None else RecordedWorkflow(workflow)
        self._engine = TimedEngine(engine)
        self._num_samples = num_samples
        self._should_accept = should_accept
        self._stall_limit_s = stall_limit_s
        self._is_checked = is_checked

    async def run(self, task: TaskInput, attempt: int, num_samples: int | None = None) -> RolloutEnd:
        """Roll out a task; never raises but for cancellation. Slowed down when records are not written fast enough."""
        records = self._records.sessions
        if records is None:
            return await self._run(task, attempt, num_samples)
        await records.room()
        sessions, outcome = collect_sessions(), Outcome.CANCELLED
        about: Attributes = {
            "headway.task_id": task.task_id,
            "headway.attempt": attempt,
            "headway.kind": self._records.kind,
        }
        try:
            with span("rollout", about) as note:
                end = await self._run(task, attempt, num_samples)
                outcome = end.outcome
                note("headway.outcome", outcome)
                return end
        finally:
            records.add(GroupSessions(self._records.kind, task.task_id, attempt, outcome, sessions))

    async def _run(self, task: TaskInput, attempt: int, num_samples: int | None) -> RolloutEnd:
        loop = asyncio.get_running_loop()
        activity = Activity(loop.time, last_at=loop.time())
        _activity.set(activity)
        scored_item.set(task.task_id)
        began, samples = loop.time(), num_samples or self._num_samples
        try:
            trajectories = await self._within_limit(task, activity, samples)
            accepted = trajectories is not None and self._accepts(trajectories)
        except Exception as error:  # noqa: BLE001 - the supervisor of a rollout: its failure is data
            return self._end(
                outcome_of(error), f"{type(error).__name__}: {error}", loop.time() - began, activity, samples
            )
        took = loop.time() - began
        if trajectories is None:
            return self._end(Outcome.REJECTED, "the workflow returned nothing", took, activity, samples)
        outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        if self._records.groups is not None:
            await self._records.groups.room()
            self._records.groups.add(FinishedGroup(task.task_id, attempt, outcome, trajectories))
        if not accepted:
            return self._end(outcome, "should_accept_fn said no", took, activity, samples)
        group = group_to_wire(Group(task.task_id, trajectories, attempt, took))
        return self._end(outcome, "", took, activity, samples, group, tokens_by_version(trajectories))

    async def _within_limit(
        self, task: TaskInput, activity: Activity, num_samples: int
    ) -> tuple[Trajectory, ...] | None:
        watched = asyncio.timeout(None)
        watch = _Watch(watched, activity, self._stall_limit_s)
        try:
            async with watched:
                watch.arm(self._stall_limit_s)
                data = orjson.loads(task.data_json)
                return await run_group(self._workflow, self._engine, data, num_samples, self._is_checked)
        except TimeoutError as error:
            if watched.expired():
                raise TimeoutError(f"neither generated nor scored for {self._stall_limit_s:g} s") from error
            raise
        finally:
            watch.disarm()

    def _accepts(self, trajectories: Sequence[Trajectory]) -> bool:
        return self._should_accept is None or bool(self._should_accept(GroupView(trajectories)))

    @staticmethod
    def _end(
        outcome: Outcome,
        message: str,
        rollout_s: float,
        activity: Activity,
        num_samples: int,
        group: pb.Group | None = None,
        versions: Mapping[int, int] | None = None,
    ) -> RolloutEnd:
        generate_s, reward_s = activity.generate_s / num_samples, activity.reward_s / num_samples
        return RolloutEnd(outcome, message, group, versions or {}, rollout_s, generate_s, reward_s)


class _Watch:
    """Ends a group when none of its calls runs and none has begun or ended for too long. One timer a group."""

    def __init__(self, timeout: asyncio.Timeout, activity: Activity, limit_s: float) -> None:
        self._timeout = timeout
        self._activity = activity
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        idle_s = 0.0 if self._activity.num_calls else self._activity.clock() - self._activity.last_at
        if idle_s >= self._limit_s:
            self._timeout.reschedule(self._activity.clock())
        else:
            self.arm(self._limit_s - idle_s)


def tokens_by_version(trajectories: Sequence[Trajectory]) -> dict[int, int]:
    """Number of gradient-carrying tokens by the step of the version that made them."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions = trajectory.versions[trajectory.loss_mask]
        if len(versions) and (versions == versions[0]).all():
            counts[int(versions[0])] += len(versions)
        else:
            found, numbers = np.unique(versions, return_counts=True)
            counts.update(dict(zip(found.tolist(), numbers.tolist(), strict=True)))
    return dict(counts)
