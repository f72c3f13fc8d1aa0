"""The rollout controller as the trainer speaks to it: every call is idempotent, and is repeated until it is answered.

The controller may restart at any time, at another address. A call that finds it gone resolves its name again and is
repeated with backoff; a call that waits long is cut into pieces of `PIECE_S`, so that a lost connection shows and each
piece can be logged. Errors that a repetition cannot cure (an old fencing token, a bad request) are raised at once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from headway.core.trajectory import Group, Outcome
from headway.core.version import PolicyVersion
from headway.data import Task
from headway.errors import TimedOut
from headway.runtime.grpc_client import connect, translating
from headway.runtime.waits import Waits
from headway.runtime.wire import (
    OUTCOME_FROM_WIRE,
    group_from_bytes,
    group_from_wire,
    version_from_wire,
    version_to_wire,
)
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerStub

PIECE_S = 60.0
"""A call that waits is repeated after so long."""
CALL_S = 30.0
"""Deadline of a call that does not wait for rollouts."""
EVALUATION_SILENCE_S = 1800.0
"""An evaluation in which nothing finishes for so long has failed."""
PATIENCE_S = 900.0
"""A controller that stays away for so long ends the trainer."""
BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
TASKS_IN_MESSAGE = 64
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
Reply = TypeVar("Reply")
log = logging.getLogger(__name__)


class Resolver(Protocol):
    """Finds the controller; `NameClient` behind it in production."""

    async def __call__(self) -> str:
        """Its address, "host:port"; waits until it is registered.

        Raises:
            TimedOut: It did not appear.
            Unavailable: Name-resolve is away.
        """


@dataclass(frozen=True, slots=True)
class Submitted:
    """What the controller said to a submission."""

    num_new: int
    num_outstanding: int
    """Tasks pending, running or ready."""
    incarnation: str
    """Changes when the controller restarts."""
    eta: int
    """The staleness bound that holds now."""


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """The groups that one step consumes."""

    step: int
    groups: tuple[Group, ...]
    is_replay: bool
    waited_s: float
    num_masked_tokens: int
    eta: int
    """The staleness bound under which it was composed."""


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    task_id: str
    outcome: Outcome
    message: str
    group: Group | None


class ControllerClient:
    """Calls with the leader's fencing token.

    Args:
        resolve: Finds the controller.
        fencing_token: Of the leadership under which this trainer acts.
        waits: Shows what is waited for.
    """

    def __init__(self, resolve: Resolver, fencing_token: int, waits: Waits) -> None:
        self._resolve = resolve
        self._token = fencing_token
        self._waits = waits
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def begin(self, step: int, is_fresh: bool) -> None:
        """Say that this trainer leads, and trains `step` next.

        Raises:
            StaleVersion: A later leader exists.
        """
        request = pb.BeginRequest(fencing_token=self._token, step=step, is_fresh=is_fresh)
        await self._repeat("begin", lambda stub: stub.Begin(request, timeout=CALL_S))

    async def submit(self, tasks: Sequence[Task]) -> Submitted:
        """Hand over tasks, in order; known ones are not started again."""

        async def requests() -> AsyncIterator[pb.SubmitRequest]:
            for start in range(0, max(len(tasks), 1), TASKS_IN_MESSAGE):
                yield pb.SubmitRequest(tasks=[_to_wire(task) for task in tasks[start : start + TASKS_IN_MESSAGE]])

        reply = await self._repeat("submit tasks", lambda stub: stub.Submit(requests(), timeout=CALL_S))
        return Submitted(reply.num_new, reply.num_outstanding, reply.incarnation, reply.max_head_offpolicyness)

    async def fetch_batch(self, step: int, num_groups: int) -> FetchedBatch:
        """The batch of a step; waits until it is complete, however long.

        Raises:
            StaleVersion: A later leader exists.
        """
        request = pb.FetchBatchRequest(step=step, num_groups=num_groups, fencing_token=self._token)

        async def fetch(stub: Any) -> FetchedBatch:
            parts = [part async for part in stub.FetchBatch(request, timeout=PIECE_S)]
            header = parts[0].header
            groups = tuple(group_from_bytes(group) for part in parts for group in part.groups)
            told = header.num_masked_tokens, header.max_head_offpolicyness
            return FetchedBatch(step, groups, header.is_replay, header.waited_s, *told)

        what = f"{num_groups} ready groups for step {step}"
        with self._waits.waiting_for(what):
            return await self._repeat(what, fetch, is_long=True)

    async def commit(self, step: int, version: PolicyVersion, stats: Mapping[str, float]) -> list[PolicyVersion]:
        """Say that a step consumed its batch and made `version`; returns the versions that servers still need.

        Raises:
            StaleVersion: A later leader exists.
        """
        request = pb.CommitRequest(
            step=step, fencing_token=self._token, version=version_to_wire(version), stats=dict(stats)
        )
        reply = await self._repeat(f"commit step {step}", lambda stub: stub.Commit(request, timeout=CALL_S))
        return [version_from_wire(needed) for needed in reply.versions_in_use]

    async def forget_before(self, step: int) -> int:
        """Say that a checkpoint of `step` is complete; returns how many groups were forgotten."""
        request = pb.ForgetBeforeRequest(step=step, fencing_token=self._token)
        reply = await self._repeat("forget batches", lambda stub: stub.ForgetBefore(request, timeout=CALL_S))
        return int(reply.num_groups_forgotten)

    async def evaluate(self, version: PolicyVersion, num_samples: int, tasks: Sequence[Task]) -> list[EvaluatedTask]:
        """Roll out `tasks` with one version. A lost stream starts anew."""

        async def requests() -> AsyncIterator[pb.EvaluateRequest]:
            header = pb.EvaluateHeader(version=version_to_wire(version), num_samples=num_samples)
            yield pb.EvaluateRequest(header=header)
            for task in tasks:
                yield pb.EvaluateRequest(task=_to_wire(task))

        async def run(stub: Any) -> list[EvaluatedTask]:
            results = []
            try:
                async with asyncio.timeout(EVALUATION_SILENCE_S) as silence:
                    async for reply in stub.Evaluate(requests()):
                        silence.reschedule(asyncio.get_running_loop().time() + EVALUATION_SILENCE_S)
                        results.append(_evaluated(reply))
            except TimeoutError:
                raise TimedOut(f"{what}: nothing finished for {EVALUATION_SILENCE_S:.0f} s") from None
            return results

        what = f"evaluation of {version.label} on {len(tasks)} rows"
        with self._waits.waiting_for(what):
            return await self._repeat(what, run, is_long=True)

    async def _repeat(self, what: str, call: Callable[[Any], Awaitable[Reply]], is_long: bool = False) -> Reply:
        """Call until answered. Only a controller that is away is waited for."""
        started = away_since = time.monotonic()
        attempt = 0
        while True:
            try:
                return await call(await self._stub(is_first_try=attempt == 0))
            except grpc.aio.AioRpcError as error:
                if error.code() not in GONE:
                    with translating(what):
                        raise
                now = time.monotonic()
                if is_long and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    log.info("still waiting for %s, since %.0f s", what, now - started)
                    away_since, attempt = now, 0
                    continue
                if now - away_since > PATIENCE_S:
                    raise TimedOut(f"{what}: no rollout controller for {now - away_since:.0f} s") from error
                log.warning("%s: the rollout controller is away (%s), trying again", what, error.details())
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1

    async def _stub(self, is_first_try: bool) -> Any:
        """The controller's stub; after a failure at the address where it is registered now."""
        async with self._connecting:
            if self._channel is None or not is_first_try:
                with self._waits.waiting_for("a rollout controller to be registered"):
                    address = await self._resolve()
                if self._channel is None or address != self._address:
                    await self.close()
                    self._channel, self._address = connect(address), address
            return RolloutControllerStub(self._channel)


def _to_wire(task: Task) -> types_pb2.Task:
    return types_pb2.Task(task_id=task.task_id, data_json=task.data_json)


def _evaluated(reply: pb.EvaluateReply) -> EvaluatedTask:
    group = group_from_wire(reply.group) if reply.HasField("group") else None
    return EvaluatedTask(reply.task_id, OUTCOME_FROM_WIRE[reply.outcome], reply.message, group)
