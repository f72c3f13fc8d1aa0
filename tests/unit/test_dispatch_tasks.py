"""Tasks start in order while the budget allows; every one comes out once, to whom it belongs, also at full queues."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.staleness import StalenessManager
from headway.testing.virtual_time import run_virtual
from services.rollout_controller.dispatcher import BatchTaskDispatcher, Budget, Slots
from services.rollout_controller.task_runner import Withdrawn


@dataclass(frozen=True)
class Job:
    """A task that takes `length_s` and then returns, raises or gives nothing."""

    task_id: str
    length_s: float = 1.0
    end: str = "value"


class Log:
    """When each task ran."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.running = 0
        self.most_running = 0

    def factory(self, job: Job) -> Callable[[], Coroutine[Any, Any, str | None]]:
        async def work() -> str | None:
            self.started.append(job.task_id)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await asyncio.sleep(job.length_s)
            finally:
                self.running -= 1
            if job.end == "cancel":
                raise asyncio.CancelledError
            if job.end == "raise":
                raise ValueError(job.task_id)
            return job.task_id if job.end == "value" else None

        return work


def make(budget: Budget, queue_size: int = 100) -> tuple[BatchTaskDispatcher[Job, str], Log]:
    log = Log()
    return BatchTaskDispatcher(queue_size, log.factory, budget), log


def test_tasks_start_in_the_order_of_submission_and_no_more_than_the_budget_allows() -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(3))
        for row in range(10):
            dispatcher.submit_task_input(Job(str(row), length_s=1 + row % 3))
        results = await dispatcher.wait_results(10)
        assert log.started == [str(row) for row in range(10)]
        assert log.most_running == 3
        assert sorted(str(result.data) for result in results) == log.started

    run_virtual(scenario())


def test_results_come_in_the_order_of_their_end_or_of_submission_when_asked() -> None:
    async def scenario() -> None:
        for is_ordered, expected in ((False, ["2", "1", "0"]), (True, ["0", "1", "2"])):
            dispatcher, _ = make(Slots(3))
            for row, length_s in enumerate((3, 2, 1)):
                dispatcher.submit_task_input(Job(str(row), length_s))
            results = await dispatcher.wait_results(3, is_ordered=is_ordered)
            assert [result.task_id for result in results] == expected

    run_virtual(scenario())


def test_a_failure_is_a_result_and_frees_its_place() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(1))
        for row, end in enumerate(("raise", "nothing", "value")):
            dispatcher.submit_task_input(Job(str(row), end=end))
        failed, nothing, value = await dispatcher.wait_results(3)
        assert isinstance(failed.error, ValueError)
        assert nothing.data is None
        assert nothing.error is None
        assert value.data == "2"

    run_virtual(scenario())


def test_a_wait_that_times_out_returns_what_has_arrived() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(9))
        for row in range(5):
            dispatcher.submit_task_input(Job(str(row), length_s=row + 1))
        first = await dispatcher.wait_results(5, timeout=2.5)
        assert [result.task_id for result in first] == ["0", "1"]
        assert await dispatcher.wait_results(1, timeout=0) == []
        assert [result.task_id for result in await dispatcher.wait_results(3)] == ["2", "3", "4"]

    run_virtual(scenario())


def test_a_cancelled_wait_loses_nothing() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(9))
        for row in range(4):
            dispatcher.submit_task_input(Job(str(row), length_s=row + 1))
        waiting = asyncio.ensure_future(dispatcher.wait_results(4))
        await asyncio.sleep(2.5)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert [result.task_id for result in await dispatcher.wait_results(4)] == ["0", "1", "2", "3"]

    run_virtual(scenario())


def test_results_belong_to_who_submitted() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(9))
        for row in range(6):
            dispatcher.submit_task_input(Job(str(row)), owner=row % 2)
        odd = await dispatcher.wait_results(3, owner=1, is_ordered=True)
        even = await dispatcher.wait_results(3, owner=0, is_ordered=True)
        assert [result.task_id for result in odd] == ["1", "3", "5"]
        assert [result.task_id for result in even] == ["0", "2", "4"]

    run_virtual(scenario())


def test_an_owner_that_is_gone_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(3), queue_size=2)
        for row in range(9):
            dispatcher.submit_task_input(Job(str(row)), owner="gone")
        dispatcher.submit_task_input(Job("9"), owner="here")
        await asyncio.sleep(1.5)
        dispatcher.forget("gone")
        assert [result.task_id for result in await dispatcher.wait_results(1, owner="here")] == ["9"]
        assert log.running == dispatcher.num_running == dispatcher.num_pending == 0
        assert await dispatcher.wait_results(1, timeout=0, owner="gone") == []

    run_virtual(scenario())


def test_a_full_result_queue_holds_tasks_back_and_loses_none() -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(3), queue_size=2)
        for row in range(12):
            dispatcher.submit_task_input(Job(str(row)))
        await asyncio.sleep(100)
        assert len(log.started) == 2 + 3
        results = await dispatcher.wait_results(12)
        assert sorted(int(result.task_id) for result in results) == list(range(12))

    run_virtual(scenario())


def test_pause_stops_new_starts_and_what_ends_is_collected() -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(2))
        for row in range(4):
            dispatcher.submit_task_input(Job(str(row)))
        await asyncio.sleep(0.5)
        dispatcher.pause()
        assert len(await dispatcher.wait_results(4, timeout=10)) == 2
        assert len(log.started) == 2
        dispatcher.resume()
        assert len(await dispatcher.wait_results(2)) == 2

    run_virtual(scenario())


def test_a_cancelled_task_ends_with_a_result() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(2))
        dispatcher.submit_task_input(Job("0", length_s=1e9))
        await asyncio.sleep(1)
        assert dispatcher.cancel("0", "late")
        assert not dispatcher.cancel("0", "late")
        (result,) = await dispatcher.wait_results(1)
        assert isinstance(result.error, Withdrawn)
        assert str(result.error) == "late"
        assert dispatcher.num_running == 0

    run_virtual(scenario())


def test_a_task_that_is_cancelled_in_the_tick_of_its_start_ends_with_a_result() -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(2))
        dispatcher.submit_task_input(Job("0"))
        await asyncio.sleep(0)  # the dispatcher queues it
        asyncio.get_running_loop().call_soon(dispatcher.cancel, "0", "late")  # behind the runner, which makes the task
        (result,) = await dispatcher.wait_results(1)
        assert isinstance(result.error, Withdrawn)
        assert str(result.error) == "late"
        assert log.started == []

    run_virtual(scenario())


def test_a_task_that_waits_for_room_cannot_be_cancelled_any_more() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(2), queue_size=1)
        for row in range(2):
            dispatcher.submit_task_input(Job(str(row), length_s=1 + row))
        await asyncio.sleep(5)
        assert not dispatcher.cancel("1", "late")
        assert [result.data for result in await dispatcher.wait_results(2)] == ["0", "1"]

    run_virtual(scenario())


def test_a_task_that_cancels_itself_is_no_lost_task() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(Slots(1))
        for row, end in enumerate(("cancel", "value")):
            dispatcher.submit_task_input(Job(str(row), end=end))
        first, second = await dispatcher.wait_results(2)
        assert isinstance(first.error, asyncio.CancelledError)
        assert second.data == "1"

    run_virtual(scenario())


def test_closing_leaves_nothing_running() -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(2), queue_size=1)
        for row in range(6):
            dispatcher.submit_task_input(Job(str(row)))
        await asyncio.sleep(1.5)
        await dispatcher.close()
        assert log.running == dispatcher.num_running == 0

    run_virtual(scenario())


class Served:
    version = 0

    def get_version(self) -> int:
        return self.version


def test_a_new_version_wakes_what_the_budget_held_back() -> None:
    async def scenario() -> None:
        served = Served()
        dispatcher, log = make(StalenessManager(served, 100, consumer_batch_size=2, max_staleness=0))
        for row in range(6):
            dispatcher.submit_task_input(Job(str(row)))
        assert len(await dispatcher.wait_results(6, timeout=50)) == 2
        served.version = 1
        dispatcher.wake()
        assert len(await dispatcher.wait_results(2)) == 2
        assert len(log.started) == 4

    run_virtual(scenario())


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["value", "raise", "nothing"])), max_size=30),
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_every_task_comes_out_once_whatever_the_queues_and_waits(
    jobs: list[tuple[int, str]], slots: int, queue_size: int, counts: list[int]
) -> None:
    async def scenario() -> None:
        dispatcher, log = make(Slots(slots), queue_size)
        for row, (length_s, end) in enumerate(jobs):
            dispatcher.submit_task_input(Job(str(row), length_s, end))
        seen: list[str] = []
        for count in itertools.cycle(counts):
            if len(seen) == len(jobs):
                break
            taken = await dispatcher.wait_results(min(count, len(jobs) - len(seen)), timeout=count / 2)
            seen += [result.task_id for result in taken]
        assert sorted(seen, key=int) == log.started == [str(row) for row in range(len(jobs))]
        assert log.most_running <= slots
        assert await dispatcher.wait_results(1, timeout=1000) == []

    run_virtual(scenario())
