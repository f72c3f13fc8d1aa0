"""What the trainer relies on: one batch for one step, tasks that end once, leaders that take over, waits with names."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from headway.core.ledger import TaskState
from headway.core.selection import StalenessPolicy
from headway.core.trajectory import Outcome
from headway.core.version import PolicyVersion
from headway.errors import HeadwayError, InvalidInput, NotFound, StaleVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import group_from_bytes
from headway.testing.model_fleet import ModelFleet, ModelWorkflow
from headway.testing.simulated_disk import SimulatedDisk
from headway.testing.virtual_time import run_virtual
from headway.workflow.api import ModelRequest
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.journal_store import JournalBroken, JournalStore
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, TaskInput
from services.rollout_controller.status import Status, Surroundings, holds_back

BATCH = 2


class World:
    """A controller on a fleet of one server, in virtual time. A row's length is its `tokens`, at one a second."""

    def __init__(self, disk: SimulatedDisk[JournalStore], **settings: Any) -> None:
        self.disk = disk
        self.fleet = ModelFleet(1, tokens_per_s=1.0, length_of=_tokens_of, load_s=0.0)
        self.settings = Settings(**{"batch_size": BATCH, "eta": 1, "max_concurrent": 9, "queue_size": 99} | settings)
        self.rewards: dict[int, float | None] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RolloutController]:
        async with Supervisor() as supervisor:
            runner = GroupRunner(ModelWorkflow(self._score), self.fleet, num_samples=1)
            waits = Waits(asyncio.get_running_loop().time)
            self.controller = RolloutController(
                self.settings, self.disk.open(), self.fleet, runner, lambda _: runner, supervisor, waits, lambda: 1.5e9
            )
            self.supervisor = supervisor
            await self.controller.start()
            yield self.controller
            self.controller.ledger.check()
            await self.controller.close()

    async def _score(self, data: dict[str, Any]) -> float | None:
        return self.rewards.get(data["row"], 1.0)

    async def one_failure(self, task_id: str) -> None:
        while not self.controller.ledger.records[task_id].history:  # noqa: ASYNC110 - turn by turn of the loop
            await asyncio.sleep(0)

    async def step(self, step: int) -> list[str]:
        """Fetch, train for no time, publish, commit."""
        names = await self.fetch(step)
        self.fleet.publish(step + 1)
        await self.controller.commit(step, 1, PolicyVersion(1, step + 1), {})
        return names

    async def fetch(self, step: int, token: int = 1) -> list[str]:
        await self.controller.fetch_batch(step, BATCH, token)
        pages = [page async for page in self.controller.groups(step)]
        return [group_from_bytes(group).task_id for page in pages for group in page]


def _tokens_of(request: ModelRequest) -> int:
    return int(request.metadata.get("tokens", 1))


def rows(*numbers: int, **data: Any) -> list[TaskInput]:
    return [TaskInput(f"0/{row}", orjson.dumps({"row": row, **data})) for row in numbers]


def scenario(**settings: Any) -> Callable[[Callable[[World], Awaitable[None]]], Callable[[], None]]:
    """Make a test of a coroutine that gets a world with a running controller and version 0 published."""

    def decorate(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            world = World(SimulatedDisk(JournalStore(":memory:")), **settings)
            async with world.running():
                world.fleet.publish(0)
                await test(world)

        def wrapped() -> None:
            run_virtual(run())

        wrapped.__doc__ = test.__doc__
        return wrapped

    return decorate


@scenario()
async def test_asked_at_the_same_time_a_step_gets_one_batch(world: World) -> None:
    await world.controller.submit(rows(0, 1, 2, 3))
    first, second, third = await asyncio.gather(world.fetch(0), world.fetch(0), world.fetch(1))
    assert first == second == ["0/0", "0/1"]
    assert third == ["0/2", "0/3"]


@scenario(eta=0)
async def test_with_eta_0_nothing_starts_before_the_step_is_served(world: World) -> None:
    await world.controller.submit(rows(*range(6)))
    assert await world.fetch(0) == ["0/0", "0/1"]
    await world.controller.commit(0, 1, PolicyVersion(1, 1), {})
    await asyncio.sleep(100)
    assert world.controller.ledger.counts[TaskState.PENDING] == 4
    world.fleet.publish(1)
    assert await world.fetch(1) == ["0/2", "0/3"]


@scenario()
async def test_a_task_is_taken_up_once_also_when_it_has_ended(world: World) -> None:
    world.rewards = {2: None}
    assert await world.controller.submit(rows(0, 1, 1, 2)) == 3
    assert await world.step(0) == ["0/0", "0/1"]
    await world.controller.forget_before(1, 1)
    assert await world.controller.submit(rows(0, 1, 2, 3)) == 1
    assert world.controller.ledger.num_submitted == 4


@scenario(policy=StalenessPolicy.DISCARD, max_concurrent=100)
async def test_with_discard_what_can_no_longer_be_in_time_is_cancelled_and_queued_again(world: World) -> None:
    await world.controller.submit(rows(0, tokens=50) + rows(1, 2, 3, 4, 5, 6, 7))
    await world.step(0)
    assert world.controller.ledger.records["0/0"].state is TaskState.RUNNING
    await world.step(1)
    await asyncio.sleep(0.5)
    record = world.controller.ledger.records["0/0"]
    assert [failure.outcome for failure in record.history] == [Outcome.CANCELLED]
    assert "too late for step 2" in record.history[0].message


@scenario(policy=StalenessPolicy.DISCARD, eta=1)
async def test_a_group_that_is_too_old_is_discarded_with_its_reason_and_made_again(world: World) -> None:
    """Step 1 never asks, so that the groups of version 0 are two old when step 2 does."""
    await world.controller.submit(rows(*range(8)))
    assert await world.fetch(0) == ["0/0", "0/1"]
    await asyncio.sleep(5)
    world.fleet.publish(1)
    world.fleet.publish(2)
    await asyncio.sleep(0)
    await world.fetch(2)
    history = world.controller.ledger.records["0/2"].history
    assert [failure.outcome for failure in history] == [Outcome.STALE]
    assert "version step 0" in history[0].message


@scenario()
async def test_poison_is_given_up_after_three_attempts_and_holds_nobody_up(world: World) -> None:
    await world.controller.submit(rows(0, is_poison=True) + rows(1, 2, 3, 4))
    assert await world.step(0) == ["0/1", "0/2"]
    assert await world.step(1) == ["0/3", "0/4"]
    await asyncio.sleep(1)
    history = world.controller.ledger.quarantined["0/0"]
    assert [(one.attempt, one.outcome) for one in history] == [(n, Outcome.WORKFLOW_ERROR) for n in (1, 2, 3)]
    assert "a poison prompt" in history[0].message
    assert await world.controller.submit(rows(0)) == 0


@scenario()
async def test_a_run_in_which_nothing_works_ends_with_the_last_reason(world: World) -> None:
    await world.controller.submit(rows(*range(20), is_poison=True))
    with pytest.raises(HeadwayError, match=r"none succeeded; the last one, 0/\d+: workflow_error: .*a poison prompt"):
        await world.supervisor.wait()


@scenario()
async def test_a_rejected_task_ends_and_the_batch_is_filled_up_from_the_others(world: World) -> None:
    world.rewards = {0: None, 1: None, 3: None}
    await world.controller.submit(rows(*range(6)))
    assert await world.step(0) == ["0/2", "0/4"]
    assert world.controller.ledger.counts[TaskState.REJECTED] == 3


@scenario()
async def test_a_skipped_step_spends_its_batch_and_gets_another(world: World) -> None:
    await world.controller.submit(rows(*range(6)))
    assert await world.fetch(0) == ["0/0", "0/1"]
    for _ in range(2):
        await world.controller.commit(0, 1, PolicyVersion(1, 0), {})
    assert await world.fetch(0) == ["0/2", "0/3"]
    assert await world.controller.submit(rows(0, 1)) == 0


@scenario()
async def test_a_newer_leader_takes_over_and_the_older_one_is_refused_everywhere(world: World) -> None:
    controller = world.controller
    await controller.submit(rows(0, 1))
    assert await world.step(0) == ["0/0", "0/1"]
    waiting = asyncio.ensure_future(world.fetch(1, token=1))
    await asyncio.sleep(1)
    await controller.begin(2, step=0, is_fresh=False)
    for call in (
        waiting,
        controller.begin(1, step=0, is_fresh=True),
        controller.commit(0, 1, PolicyVersion(1, 1), {}),
        controller.forget_before(1, 1),
    ):
        with pytest.raises(StaleVersion, match="fencing token 1 is old"):
            await call
    assert await world.fetch(0, token=2) == ["0/0", "0/1"]


@scenario()
async def test_a_fresh_run_drops_everything_once(world: World) -> None:
    await world.controller.submit(rows(*range(6)))
    await world.fetch(0)
    for _ in range(2):
        await world.controller.begin(5, step=0, is_fresh=True)
        assert world.controller.ledger.num_submitted in (0, 6)
        assert await world.controller.submit(rows(*range(6))) in (6, 0)
    assert await world.fetch(0, token=5) == ["0/0", "0/1"]
    assert world.controller.ledger.num_submitted == 6


@scenario()
async def test_what_cannot_be_is_refused_at_once_in_words(world: World) -> None:
    controller = world.controller
    await controller.submit(rows(*range(4)))
    with pytest.raises(InvalidInput, match="consumer_batch_size is 2"):
        await controller.fetch_batch(0, BATCH + 1, 1)
    with pytest.raises(NotFound, match="no batch was handed out for step 0"):
        await controller.commit(0, 1, PolicyVersion(1, 1), {})
    with pytest.raises(InvalidInput, match="makes version step 1, not 7"):
        await controller.commit(0, 1, PolicyVersion(1, 7), {})
    with pytest.raises(InvalidInput, match="no task_id"):
        await controller.submit([TaskInput("", b"{}")])
    await world.step(0)
    await controller.forget_before(1, 1)
    await controller.commit(0, 1, PolicyVersion(1, 1), {})
    with pytest.raises(NotFound, match="step 0 was forgotten"):
        await controller.fetch_batch(0, BATCH, 1)


@scenario()
async def test_a_wait_shows_its_name_and_its_length_and_ends(world: World) -> None:
    fetching = asyncio.ensure_future(world.fetch(0))
    await asyncio.sleep(7)
    (wait,) = world.controller.waits.snapshot()
    assert (wait.what, wait.since_s) == ("2 ready groups for step 0", 7.0)
    await world.controller.submit(rows(0, 1))
    await fetching
    assert world.controller.waits.snapshot() == []
    assert world.controller.history.recent[-1].waited_s == 8.0


@scenario()
async def test_a_journal_that_cannot_be_written_ends_the_process_with_the_reason(world: World) -> None:
    world.disk.store.close()
    await asyncio.gather(world.controller.submit(rows(0)), return_exceptions=True)
    with pytest.raises(Exception, match=r"write the journal: .*closed database"):
        await world.supervisor.wait()


@scenario(max_concurrent=1)
async def test_the_status_says_what_holds_back(world: World) -> None:
    controller = world.controller
    await asyncio.sleep(1)
    assert holds_back(controller).startswith("no task is pending")
    await controller.submit(rows(*range(9)))
    await asyncio.sleep(0.5)
    assert holds_back(controller) == "rollout.max_concurrent_rollouts: 1 tasks run"
    await asyncio.sleep(50)
    assert holds_back(controller).startswith("staleness: 4 groups are not yet trained on")
    controller.production.dispatcher.pause()
    assert holds_back(controller) == "new starts are paused"


@scenario()
async def test_the_report_has_the_history_of_every_step(world: World) -> None:
    await world.controller.submit(rows(*range(8)))
    for step in range(3):
        await world.step(step)
    report = await Status("run", world.controller, Surroundings(), 0.0).report(12.0)
    assert [step.version for step in report.history] == ["v1.1", "v1.2", "v1.3"]
    assert report.history[0].committed_at == 1.5e9
    assert sum(report.tokens.gradient.values()) == 3 * BATCH
    assert report.tasks.is_conserved
    assert report.timing.rollout_s == report.timing.generate_s == 1.0


def test_nothing_starts_before_a_version_is_served() -> None:
    async def run() -> None:
        world = World(SimulatedDisk(JournalStore(":memory:")))
        async with world.running() as controller:
            await controller.submit(rows(0, 1))
            await asyncio.sleep(100)
            assert controller.ledger.counts[TaskState.PENDING] == 2
            assert holds_back(controller) == "no server serves a published version yet"

    run_virtual(run())


def test_a_group_is_ready_only_when_it_is_on_disk() -> None:
    async def run() -> None:
        world = World(SimulatedDisk(JournalStore(":memory:"), latency_s=7.0))
        async with world.running() as controller:
            world.fleet.publish(0)
            await controller.submit(rows(0, 1))
            fetching = asyncio.ensure_future(world.fetch(0))
            await asyncio.sleep(5)
            assert controller.ledger.counts[TaskState.SAVING] == BATCH
            await asyncio.sleep(5)
            assert controller.ledger.counts[TaskState.LEASED] == BATCH
            assert await fetching == ["0/0", "0/1"]

    run_virtual(run())


@scenario(keeps_batches=False)
async def test_without_recovery_a_batch_is_dropped_when_the_next_one_is_committed(world: World) -> None:
    await world.controller.submit(rows(*range(8)))
    for step in range(3):
        await world.step(step)
    assert [*world.controller.ledger.batches] == [2]
    assert world.disk.store.recover().num_ended == {TaskState.CONSUMED: 2 * BATCH}
    assert await world.controller.submit(rows(*range(8))) == 0
    assert [record.step for record in await world.controller.all_steps()] == [0, 1, 2]


def test_what_is_known_survives_a_restart() -> None:
    async def run() -> None:
        disk = SimulatedDisk(JournalStore(":memory:"))
        before = World(disk)
        before.rewards = {4: None}
        async with before.running():
            before.fleet.publish(0)
            await before.controller.submit(rows(0, 1, 2, 3, 4, 5) + rows(6, is_poison=True))
            await before.step(0)
            await before.fetch(1)
            await asyncio.sleep(9)
            histogram = before.controller.history.tokens_by_staleness
        after = World(disk)
        async with after.running() as controller:
            after.fleet.publish(1)
            assert controller.history.tokens_by_staleness == histogram
            assert controller.history.num_committed == 1
            assert controller.history.recent[0].version == PolicyVersion(1, 1)
            assert await controller.submit(rows(*range(7))) == 0
            counts = {state: count for state, count in controller.ledger.counts.items() if count}
            assert counts == {
                TaskState.CONSUMED: 2,
                TaskState.LEASED: 2,
                TaskState.READY: 1,
                TaskState.REJECTED: 1,
                TaskState.QUARANTINED: 1,
            }
            assert await after.fetch(0) == ["0/0", "0/1"]
            assert await after.fetch(1) == ["0/2", "0/3"]

    run_virtual(run())


def test_attempts_that_failed_before_a_restart_still_count() -> None:
    async def run() -> None:
        disk = SimulatedDisk(JournalStore(":memory:"))
        before = World(disk, max_concurrent=1)
        poison = rows(0, is_poison=True)
        async with before.running():
            before.fleet.publish(0)
            await before.controller.submit(poison)
            await before.one_failure("0/0")
            before.controller.production.dispatcher.pause()
            await asyncio.sleep(1)
        num_failed = disk.store.failures(["0/0"])[-1].attempt
        after = World(disk)
        async with after.running() as controller:
            after.fleet.publish(0)
            await controller.submit(poison)
            await asyncio.sleep(9)
            assert len(controller.ledger.quarantined["0/0"]) == 3
            assert controller.production.num_outcomes[Outcome.WORKFLOW_ERROR] == 3 - num_failed

    run_virtual(run())


async def evaluate(world: World, *tasks: TaskInput, version: int = 0) -> dict[str, tuple[Outcome, str]]:
    async def stream() -> AsyncIterator[TaskInput]:
        for task in tasks:
            yield task

    ends = world.controller.evaluations.run(PolicyVersion(1, version), 2, stream())
    return {task_id: (end.outcome, end.message) async for task_id, end in ends}


@scenario(eta=0)
async def test_an_evaluation_runs_beside_a_full_budget_and_leaves_it_as_it_is(world: World) -> None:
    await world.controller.submit(rows(*range(9), tokens=100))
    await asyncio.sleep(1)
    ends = await evaluate(world, *rows(0, 1, 2), *rows(3, is_poison=True))
    assert [ends[f"0/{row}"][0] for row in range(4)] == [Outcome.ACCEPTED] * 3 + [Outcome.WORKFLOW_ERROR]
    assert world.controller.ledger.counts[TaskState.RUNNING] == BATCH
    assert world.controller.ledger.num_submitted == 9


@scenario()
async def test_a_token_of_another_version_spoils_an_evaluation_by_name(world: World) -> None:
    evaluating = asyncio.ensure_future(evaluate(world, *rows(0, tokens=10)))
    await asyncio.sleep(5)
    world.fleet.publish(1)
    ends = await evaluating
    assert ends["0/0"] == (Outcome.EVIDENCE_INVALID, "tokens of version step 1 in an evaluation of v1.0")


@scenario()
async def test_an_evaluation_that_nobody_reads_any_more_stops(world: World) -> None:
    evaluating = asyncio.ensure_future(evaluate(world, *rows(0, 1, tokens=10**6)))
    await asyncio.sleep(5)
    assert world.controller.evaluations.dispatcher.num_running == 2
    evaluating.cancel()
    await asyncio.sleep(1)
    assert world.controller.evaluations.dispatcher.num_running == 0
    assert not any(server.running for server in world.fleet.servers)


def test_a_journal_error_has_a_class_of_its_own() -> None:
    with pytest.raises(JournalBroken):
        JournalStore("/nonexistent/folder/journal.sqlite")


@scenario()
async def test_a_held_run_starts_nothing_whatever_is_served_until_it_is_let_go(world: World) -> None:
    world.controller.hold(True)
    await world.controller.submit(rows(0, 1, 2, 3))
    for step in (1, 2):
        world.fleet.publish(step)
        await asyncio.sleep(10)
        assert world.controller.ledger.counts[TaskState.PENDING] == 4
    world.controller.hold(False)
    await asyncio.sleep(10)
    assert world.controller.ledger.counts[TaskState.READY] == 4


@scenario(eta=0, policy=StalenessPolicy.MASK)
async def test_another_bound_opens_the_budget_at_once_and_closes_it_for_the_next_batch(world: World) -> None:
    await world.controller.submit(rows(*range(8)))
    await asyncio.sleep(10)
    assert world.controller.ledger.counts[TaskState.READY] == BATCH
    world.controller.change(eta=2, max_concurrent=9)
    await asyncio.sleep(10)
    assert world.controller.ledger.counts[TaskState.READY] == 3 * BATCH
    await world.step(0)
    assert len(await world.fetch(1)) == BATCH
    world.controller.change(eta=0, max_concurrent=9)
    pages = [page async for page in world.controller.groups(1)]
    masks = [group_from_bytes(group).trajectories[0].loss_mask for page in pages for group in page]
    assert all(mask.any() for mask in masks), "a batch keeps the bound under which it was handed out"
    world.fleet.publish(2)
    await world.controller.commit(1, 1, PolicyVersion(1, 2), {})
    await world.fetch(2)
    assert world.controller.ledger.num_discarded[Outcome.STALE] == BATCH
