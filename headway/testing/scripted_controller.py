"""A rollout controller whose batches are made up: real gRPC, no engines, no rewards.

Groups come from a function of the task and the step that consumes them, so a run against it is reproducible to the last
bit. It keeps the promises that a trainer rests on (idempotent submission and fetching, fencing, replay, skipped steps),
and remembers every call for tests to look at.
"""

import asyncio
import uuid
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.core.trajectory import NO_VERSION, Group, Outcome, StopReason, Trajectory
from headway.core.version import PolicyVersion
from headway.errors import NotFound, StaleVersion
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.wire import OUTCOME_TO_WIRE, group_to_wire, version_from_wire, version_to_wire
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerServicer, add_RolloutControllerServicer_to_server

SERVICE = "headway.v1.RolloutController"
MakeGroup = Callable[[str, int], Group]
"""(task id, step of the version that generates) -> its group."""


@dataclass(frozen=True)
class Committed:
    """One commit."""

    step: int
    version: PolicyVersion
    stats: dict[str, float]


@dataclass
class ScriptedController(RolloutControllerServicer):
    """The servicer, and what it has seen."""

    make_group: MakeGroup
    staleness: int = 0
    """How many versions old the tokens of every batch are, where there were so many."""
    eta: int = 1
    """The staleness bound that it says holds."""
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    tasks: dict[str, bytes] = field(default_factory=dict)
    """Every task that was ever submitted, in order."""
    pending: dict[str, None] = field(default_factory=dict)
    batches: dict[int, list[Group]] = field(default_factory=dict)
    consumed: list[str] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    commits: list[Committed] = field(default_factory=list)
    begins: list[tuple[int, int, bool]] = field(default_factory=list)
    """(fencing token, step, is_fresh)"""
    fetches: list[tuple[int, bool]] = field(default_factory=list)
    """(step, is_replay)"""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """("fetch" or "commit", step), in the order in which they came"""
    refusals: list[str] = field(default_factory=list)
    evaluations: list[tuple[PolicyVersion, int]] = field(default_factory=list)
    """(version, rows)"""
    forgotten_before: int = 0
    fencing_token: int = 0
    versions_in_use: list[PolicyVersion] = field(default_factory=list)
    is_open: bool = True
    """False: batches are held back."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def open(self, is_open: bool) -> None:
        """Give out batches, or hold them back."""
        async with self.changed:
            self.is_open = is_open
            self.changed.notify_all()

    async def until(self, condition: Callable[["ScriptedController"], bool], timeout_s: float = 60.0) -> None:
        """Wait until something has happened here.

        Raises:
            TimeoutError: It did not.
        """
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: condition(self))

    async def Begin(self, request: pb.BeginRequest, context: Any) -> pb.BeginReply:
        self._check(request.fencing_token, "begin")
        async with self.changed:
            self.fencing_token = request.fencing_token
            self.begins.append((request.fencing_token, request.step, request.is_fresh))
            if request.is_fresh:
                self.tasks, self.pending, self.batches, self.consumed, self.committed = {}, {}, {}, [], set()
            self.changed.notify_all()
        return pb.BeginReply()

    async def Submit(self, requests: AsyncIterable[pb.SubmitRequest], context: Any) -> pb.SubmitReply:
        num_new = 0
        async for request in requests:
            for task in request.tasks:
                if task.task_id not in self.tasks:
                    num_new += 1
                    self.tasks[task.task_id] = task.data_json
                    self.pending[task.task_id] = None
        async with self.changed:
            self.changed.notify_all()
        return pb.SubmitReply(
            num_new=num_new,
            num_outstanding=len(self.pending),
            incarnation=self.incarnation,
            max_head_offpolicyness=self.eta,
        )

    async def FetchBatch(self, request: pb.FetchBatchRequest, context: Any) -> AsyncIterator[pb.FetchBatchReply]:
        self._check(request.fencing_token, f"fetch {request.step}")
        self.calls.append(("fetch", request.step))
        is_replay = request.step in self.batches
        async with self.changed:
            if not is_replay:
                await self.changed.wait_for(lambda: self.is_open and len(self.pending) >= request.num_groups)
                self.batches[request.step] = self._compose(request.step, request.num_groups)
            self.fetches.append((request.step, is_replay))
            self.changed.notify_all()
        groups = self.batches[request.step]
        header = pb.BatchHeader(
            step=request.step, num_groups=len(groups), is_replay=is_replay, max_head_offpolicyness=self.eta
        )
        yield pb.FetchBatchReply(header=header)
        for group in groups:
            yield pb.FetchBatchReply(groups=[group_to_wire(group).SerializeToString()])

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitReply:
        self._check(request.fencing_token, f"commit {request.step}")
        self.calls.append(("commit", request.step))
        if request.step not in self.batches:
            raise NotFound(f"no batch was handed out for step {request.step}")
        version = version_from_wire(request.version)
        async with self.changed:
            self.commits.append(Committed(request.step, version, dict(request.stats)))
            if request.step not in self.committed:
                self.consumed += [group.task_id for group in self.batches[request.step]]
                self.committed.add(request.step)
            if version.step == request.step:
                del self.batches[request.step]
                self.committed.discard(request.step)
            self.changed.notify_all()
        return pb.CommitReply(versions_in_use=[version_to_wire(used) for used in self.versions_in_use])

    async def ForgetBefore(self, request: pb.ForgetBeforeRequest, context: Any) -> pb.ForgetBeforeReply:
        self._check(request.fencing_token, "forget")
        old = [step for step in self.batches if step < request.step]
        forgotten = sum(len(self.batches.pop(step)) for step in old)
        async with self.changed:
            self.forgotten_before = request.step
            self.changed.notify_all()
        return pb.ForgetBeforeReply(num_groups_forgotten=forgotten)

    async def Evaluate(
        self, requests: AsyncIterable[pb.EvaluateRequest], context: Any
    ) -> AsyncIterator[pb.EvaluateReply]:
        version = PolicyVersion(0, 0)
        num_rows = 0
        async for request in requests:
            if request.HasField("header"):
                version = version_from_wire(request.header.version)
                continue
            num_rows += 1
            yield self._evaluated(request.task, version)
        async with self.changed:
            self.evaluations.append((version, num_rows))
            self.changed.notify_all()

    def _evaluated(self, task: types_pb2.Task, version: PolicyVersion) -> pb.EvaluateReply:
        group = self.make_group(f"eval/{task.task_id}", version.step)
        outcome = OUTCOME_TO_WIRE[Outcome.ACCEPTED]
        return pb.EvaluateReply(task_id=task.task_id, outcome=outcome, group=group_to_wire(group))

    def _compose(self, step: int, num_groups: int) -> list[Group]:
        chosen = list(self.pending)[:num_groups]
        for task_id in chosen:
            del self.pending[task_id]
        return [self.make_group(task_id, max(0, step - self.staleness)) for task_id in chosen]

    def _check(self, fencing_token: int, what: str) -> None:
        if fencing_token < self.fencing_token:
            self.refusals.append(what)
            raise StaleVersion(f"{what}: fencing token {fencing_token} is older than {self.fencing_token}")


@asynccontextmanager
async def serve(controller: ScriptedController, port: int = 0) -> AsyncIterator[str]:
    """Serve it; yields its address."""

    def add(server: Any) -> None:
        add_RolloutControllerServicer_to_server(controller, server)

    async with serve_grpc("127.0.0.1", port, add, [SERVICE], grace_s=0.1) as server:
        yield f"127.0.0.1:{server.port}"


def random_group(
    task_id: str,
    step: int,
    *,
    n_samples: int = 4,
    vocabulary: int = 32,
    prompt_tokens: int = 6,
    max_new_tokens: int = 8,
) -> Group:
    """A group of ragged random samples with rewards 0 and 1; the same for the same task and step."""
    rng = np.random.default_rng([zlib.crc32(task_id.encode()), step])
    prompt = rng.integers(3, vocabulary, prompt_tokens)
    samples = [_random_sample(rng, prompt, vocabulary, max_new_tokens, step) for _ in range(n_samples)]
    return Group(task_id, tuple(samples), rollout_s=0.5)


def _random_sample(rng: Any, prompt: Any, vocabulary: int, max_new_tokens: int, step: int) -> Trajectory:
    completion = rng.integers(3, vocabulary, int(rng.integers(1, max_new_tokens + 1)))
    before, after = len(prompt), len(completion)
    return Trajectory(
        input_ids=np.concatenate([prompt, completion]).astype(np.int32),
        logprobs=np.concatenate([np.zeros(before), np.log(rng.uniform(0.2, 0.9, after))]).astype(np.float32),
        loss_mask=np.arange(before + after) >= before,
        versions=np.where(np.arange(before + after) >= before, step, NO_VERSION).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        stop_reason=StopReason.LENGTH if after == max_new_tokens else StopReason.STOP,
    )
