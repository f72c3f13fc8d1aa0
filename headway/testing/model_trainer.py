"""A model of the trainer: it does with the rollout controller what the trainer service does, over a network that is
not to be trusted.

It submits ahead of need, trains, prefetches, publishes, commits, writes checkpoints; after a crash another one starts
from the last checkpoint, replays, publishes nothing until it has caught up, and goes on. A step is skipped now and
then: its gradient was not finite.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from headway.core.ledger import Ledger
from headway.core.version import PolicyVersion
from headway.testing.invariants import Invariants
from headway.testing.scenario import Scenario
from headway.v1 import types_pb2 as pb

T = TypeVar("T")
SUBMIT_EVERY_S = 1.0
Groups = Sequence[pb.Group]


class Controller(Protocol):
    """The rollout controller, as far as a trainer speaks with it."""

    incarnation: str

    @property
    def ledger(self) -> Ledger: ...

    async def begin(self, fencing_token: int, step: int, is_fresh: bool) -> None: ...

    async def submit(self, tasks: Sequence[Any]) -> int: ...

    async def fetch_batch(self, step: int, num_groups: int, fencing_token: int) -> Any: ...

    def groups(self, step: int) -> AsyncIterator[Sequence[bytes]]: ...

    async def commit(
        self, step: int, fencing_token: int, version: PolicyVersion, stats: Mapping[str, float]
    ) -> None: ...

    async def forget_before(self, step: int, fencing_token: int) -> int: ...


class Surroundings(Protocol):
    """What a trainer finds around it."""

    scenario: Scenario
    invariants: Invariants
    rng: Random

    @property
    def published(self) -> int:
        """Newest published step."""
        ...

    async def call(self, use: Callable[[Controller], Awaitable[T]]) -> T:
        """Call the controller, again and again until it answers."""
        ...

    def publish(self, token: int, step: int) -> None:
        """Raises StaleVersion for an older leader."""
        ...

    def save(self, token: int, checkpoint: "Checkpoint") -> None: ...

    def make_task(self, row: int) -> Any: ...

    def now(self) -> float: ...


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer starts from."""

    step: int = 0
    next_row: int = 0
    consumed: frozenset[str] = frozenset()


class ModelTrainer:
    """One leadership."""

    def __init__(self, around: Surroundings, token: int, checkpoint: Checkpoint) -> None:
        self.token = token
        self._around = around
        self._scenario = around.scenario
        self._step = checkpoint.step
        self._next_row = checkpoint.next_row
        self._consumed = set(checkpoint.consumed)
        self._lineage: dict[int, Sequence[str]] = {-1: sorted(checkpoint.consumed)}
        self._submitted_to = ""
        self._committed_at = around.now()

    async def run(self) -> None:
        """Train from the checkpoint to the last step."""
        begin_at = self._step
        await self._around.call(lambda controller: controller.begin(self.token, begin_at, is_fresh=self.token == 1))
        submitting = asyncio.ensure_future(self._keep_submitting())
        fetching = self._start_fetching(self._step)
        try:
            while self._step < self._scenario.num_steps:
                groups = await fetching
                if await self._is_finite(groups):
                    fetching = self._start_fetching(self._step + 1)
                    await self._advance(groups)
                else:
                    await self._skip(groups)
                    fetching = self._start_fetching(self._step)
        finally:
            submitting.cancel()
            fetching.cancel()
            await asyncio.gather(submitting, fetching, return_exceptions=True)

    async def _is_finite(self, groups: Groups) -> bool:
        """Train one step; False: its gradient was not finite, and nothing has changed."""
        around = self._around
        around.invariants.check_batch(self._step, groups, self._lineage)
        await asyncio.sleep(self._scenario.train_s)
        return self._step < around.published or around.rng.random() >= self._scenario.p_skipped_step

    async def _advance(self, groups: Groups) -> None:
        """Publish what the step made, unless that was done before, and go on."""
        step, around = self._step, self._around
        is_replay = step < around.published
        if not is_replay:
            around.publish(self.token, step + 1)
        await self._commit(step, made=step + 1)
        self._note(groups, is_replay)
        if self._step % self._scenario.checkpoint_every == 0:
            await self._save()

    async def _skip(self, groups: Groups) -> None:
        """The groups are spent, and will not be trained on."""
        await self._commit(self._step, made=self._step)
        names = [group.task_id for group in groups]
        self._consumed.update(names)
        self._lineage[-1] = [*self._lineage[-1], *names]

    async def _commit(self, step: int, made: int) -> None:
        version = PolicyVersion(self.token, made)

        async def commit(controller: Controller) -> None:
            if made == step:  # from the moment that the controller hears of it, whether or not the trainer lives on
                self._around.invariants.forget_batch(step)
            await controller.commit(step, self.token, version, self._stats())

        await self._around.call(commit)

    def _stats(self) -> dict[str, float]:
        """As the trainer tells them: where the time since the last commit went."""
        now = self._around.now()
        took, self._committed_at = now - self._committed_at, now
        return {"timing/step": took, "timing/wait_for_batch": max(0.0, took - self._scenario.train_s)}

    def _note(self, groups: Groups, is_replay: bool) -> None:
        findings = self._around.invariants.findings
        self._lineage[self._step] = [group.task_id for group in groups]
        self._consumed.update(self._lineage[self._step])
        self._step += 1
        if is_replay:
            findings.num_replayed += 1
        else:
            findings.num_steps += 1
            findings.committed_at.append(self._around.now())

    async def _save(self) -> None:
        step = self._step
        self._around.save(self.token, Checkpoint(step, self._next_row, frozenset(self._consumed)))
        await self._around.call(lambda controller: controller.forget_before(step, self.token))

    def _start_fetching(self, step: int) -> "asyncio.Task[Groups]":
        return asyncio.ensure_future(self._fetch(step))

    async def _fetch(self, step: int) -> Groups:
        if step >= self._scenario.num_steps:
            return []

        async def fetch(controller: Controller) -> Groups:
            await controller.fetch_batch(step, self._scenario.batch_size, self.token)
            return [pb.Group.FromString(group) async for page in controller.groups(step) for group in page]

        return await self._around.call(fetch)

    async def _keep_submitting(self) -> None:
        """Tasks ahead of need, for ever."""
        while True:
            await self._around.call(self._submit)
            await asyncio.sleep(SUBMIT_EVERY_S)

    async def _submit(self, controller: Controller) -> None:
        """After a restart of the controller also all that are not consumed, again."""
        if self._submitted_to != controller.incarnation:
            again = [row for row in range(self._next_row) if f"0/{row}" not in self._consumed]
            await controller.submit([self._around.make_task(row) for row in again])
            self._submitted_to = controller.incarnation
        wanted = (self._scenario.eta + 2) * self._scenario.batch_size
        while controller.ledger.num_open < wanted:
            rows = range(self._next_row, self._next_row + wanted)
            await controller.submit([self._around.make_task(row) for row in rows])
            self._next_row += wanted
