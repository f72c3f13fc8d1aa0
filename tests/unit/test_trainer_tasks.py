"""Tasks reach the controller in order, enough and not too many, and each is trained on once, restarts included."""

import pytest

from headway.config.dataset import TrainDatasetConfig
from headway.data import Dataset, Task
from headway.data.dataset import LeftOut
from headway.errors import InvalidInput
from services.trainer.controller_client import Submitted
from services.trainer.tasks import Need, TaskFeeder


class Controller:
    """Counts what it is given; `take` is a batch that is handed out."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.open: dict[str, None] = {}
        self.incarnation = "first"

    async def submit(self, tasks: list[Task]) -> Submitted:
        new = [task.task_id for task in tasks if task.task_id not in self.known]
        self.known += new
        self.open |= dict.fromkeys(new)
        return Submitted(len(new), len(self.open), self.incarnation, eta=1)

    def take(self, count: int) -> list[str]:
        taken = list(self.open)[:count]
        for task_id in taken:
            del self.open[task_id]
        return taken

    def restart(self) -> None:
        """Everything that was not handed out is forgotten."""
        self.known = [task_id for task_id in self.known if task_id not in self.open]
        self.open = {}
        self.incarnation = "second"


def dataset() -> Dataset:
    rows = [{"prompt": str(number)} for number in range(8)]
    config = TrainDatasetConfig(batch_size=4, shuffle=False)
    return Dataset(config, 1, "test rows", rows, range(8), [1] * 8, LeftOut())


def ids(first: int, last: int) -> list[str]:
    return [f"{number // 8}/{number % 8}" for number in range(first, last)]


def feeder(controller: Controller, num_unconsumed: int = 100, clock: list[float] | None = None) -> TaskFeeder:
    now = clock or [0.0]
    need = Need(6, num_unconsumed)
    return TaskFeeder(dataset(), controller, lambda: need, look_ahead=32, clock=lambda: now[0])


async def test_tasks_are_submitted_in_order_over_epochs_and_no_more_than_needed() -> None:
    controller = Controller()
    tasks = feeder(controller)
    await tasks.top_up()
    assert controller.known == ids(0, 6)
    tasks.consume(controller.take(4))
    await tasks.top_up()
    await tasks.top_up()
    assert controller.known == ids(0, 10)


async def test_more_tasks_than_the_run_needs_are_submitted_only_when_a_shortage_lasts() -> None:
    controller, now = Controller(), [0.0]
    tasks = feeder(controller, num_unconsumed=6, clock=now)
    await tasks.top_up()
    assert controller.known == ids(0, 6)
    controller.take(4)  # handed out; the batch is on its way
    for now[0] in (0.0, 0.5, 0.9):
        await tasks.top_up()
        assert controller.known == ids(0, 6)
    now[0] = 1.0  # it never comes: they ended without a group
    await tasks.top_up()
    assert controller.known == ids(0, 10)


async def test_a_restored_feeder_submits_what_was_not_consumed_and_goes_on() -> None:
    controller = Controller()
    before = feeder(controller)
    await before.top_up()
    before.consume(controller.take(4))
    await before.top_up()
    state = before.state()
    later = Controller()
    after = feeder(later)
    after.restore(state)
    await after.top_up()
    assert later.known == ids(4, 10)
    after.consume(later.take(4))
    await after.top_up()
    assert later.known == ids(4, 14)


async def test_a_batch_that_a_predecessor_submitted_ahead_is_taken_over() -> None:
    controller = Controller()
    tasks = feeder(controller)
    await tasks.top_up()
    successor = feeder(controller)
    successor.restore({"cursor": [0, 2], "outstanding": ids(0, 2)})
    successor.consume(controller.take(4))
    assert successor.state() == {"cursor": [0, 4], "outstanding": []}
    await successor.top_up()
    assert controller.known == ids(0, 10)


async def test_no_task_is_consumed_twice() -> None:
    controller = Controller()
    tasks = feeder(controller)
    await tasks.top_up()
    tasks.consume(["0/1"])
    with pytest.raises(InvalidInput, match="0/1, which was trained on before"):
        tasks.consume(["0/1"])
    with pytest.raises(InvalidInput, match="no task '0/99'"):
        tasks.consume(["0/99"])


async def test_a_restarted_controller_gets_everything_outstanding_again() -> None:
    controller = Controller()
    tasks = feeder(controller)
    await tasks.top_up()
    tasks.consume(controller.take(2))
    controller.restart()
    await tasks.top_up()
    assert list(controller.open) == ids(2, 8)
