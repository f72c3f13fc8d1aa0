"""Keep enough tasks at the rollout controller, and know which of them have been trained on.

    dataset -- cursor --> [outstanding: submitted, not consumed] -- consume --> gone

Decides: how many tasks are submitted ahead of need, and what is submitted again after a restart of either side.
Guarantee: every task that the cursor has passed is outstanding or was consumed once. A group whose task is neither
outstanding nor ahead of the cursor is refused: no group is trained on twice. Both ends of a crash agree, because a task
submitted twice is one task, and the state that a checkpoint stores is exactly what has not been consumed at that step.
Proved in test_trainer_tasks.py.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from headway.data import Cursor, Dataset, Task
from headway.errors import InvalidInput
from services.trainer.controller_client import Submitted

REFRESH_S = 0.5
"""How often the controller is asked for its number of tasks while nothing else happens."""
CONFIRM_S = 1.0
"""How long a shortage that may be a batch on its way must last."""
log = logging.getLogger(__name__)


class Submitter(Protocol):
    """The part of the controller's client that takes tasks."""

    async def submit(self, tasks: list[Task]) -> Submitted:
        """Hand over tasks, in order."""


@dataclass(frozen=True, slots=True)
class Need:
    """How many tasks should be pending, running or ready at the controller."""

    num_tasks: int
    num_unconsumed: int
    """Groups that the rest of the run trains on, those in hand left out."""


class TaskFeeder:
    """Submits tasks in the dataset's order.

    Args:
        dataset: Rows to train on.
        controller: Takes the tasks.
        need: Says how many tasks should be there now.
        look_ahead: A task that a batch holds and the cursor has not reached is searched in so many tasks: what a
            predecessor may have submitted after its last checkpoint.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        dataset: Dataset,
        controller: Submitter,
        need: Callable[[], "Need"],
        look_ahead: int = 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dataset = dataset
        self._controller = controller
        self._need = need
        self._look_ahead = look_ahead
        self._cursor = Cursor()
        self._upcoming = dataset.tasks(self._cursor)
        self._outstanding: dict[str, Task] = {}
        self._unsent: list[Task] = []
        self._incarnation = ""
        self._changed = asyncio.Event()
        self.eta: int | None = None
        """The staleness bound that the controller said last; None: it has said nothing yet."""
        self._clock = clock
        self._short_since = math.inf

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores; JSON-able."""
        return {"cursor": list(self._cursor), "outstanding": list(self._outstanding)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; what was not consumed then is submitted again."""
        self._cursor = Cursor(*state["cursor"])
        self._upcoming = self._dataset.tasks(self._cursor)
        tasks = [Task(task_id, self._dataset.data_of(task_id), self._cursor) for task_id in state["outstanding"]]
        self._outstanding = {task.task_id: task for task in tasks}
        self._unsent = tasks

    def resubmit(self) -> None:
        """The controller has forgotten everything: submit what is outstanding again."""
        self._unsent = list(self._outstanding.values())
        self._changed.set()

    def refresh(self) -> None:
        """The need may have changed: see to it soon."""
        self._changed.set()

    def consume(self, task_ids: Iterable[str]) -> None:
        """Book the tasks of a batch as trained on.

        Raises:
            InvalidInput: One of them was consumed before, or is not a task of this dataset.
        """
        for task_id in task_ids:
            if task_id not in self._outstanding:
                self._find_ahead(task_id)
            del self._outstanding[task_id]

    async def run(self) -> None:
        """Submit whenever the controller has too few tasks.

        consumes: tasks of the dataset      waits for: `refresh`, or REFRESH_S: a discarded rollout frees a place
        produces: submissions               waits for: the controller
        """
        while True:
            self._changed.clear()
            await self.top_up()
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._changed.wait()

    async def top_up(self) -> None:
        """Submit until the controller has as many tasks as are needed, or has been given that many."""
        submitted = await self._submit([])
        while (missing := self._missing(submitted)) > 0 or self._unsent:
            tasks = self._unsent or [self._take() for _ in range(missing)]
            self._unsent = []
            submitted = await self._submit(tasks)

    def _missing(self, submitted: Submitted) -> int:
        """How many tasks to add.

        While the run needs more groups than there are outstanding tasks, a shortage is certain. Beyond that, tasks must
        have ended without a group; but a batch that is on its way is counted neither here nor there, so such a shortage
        must last.
        """
        need, now = self._need(), self._clock()
        shortage = max(0, need.num_tasks - submitted.num_outstanding)
        certain = min(shortage, max(0, need.num_unconsumed - len(self._outstanding)))
        if shortage == certain:
            self._short_since = math.inf
            return shortage
        self._short_since = min(self._short_since, now)
        if now - self._short_since < CONFIRM_S:
            return certain
        self._short_since = math.inf
        return shortage

    async def _submit(self, tasks: list[Task]) -> Submitted:
        """Submit; when the controller has restarted, everything outstanding with it."""
        submitted = await self._controller.submit(tasks)
        if self._incarnation not in ("", submitted.incarnation):
            log.info("the rollout controller has restarted: %d tasks are submitted again", len(self._outstanding))
            submitted = await self._controller.submit(list(self._outstanding.values()))
        self._incarnation, self.eta = submitted.incarnation, submitted.eta
        return submitted

    def _take(self) -> Task:
        task = next(self._upcoming)
        self._cursor = task.after
        self._outstanding[task.task_id] = task
        return task

    def _find_ahead(self, task_id: str) -> None:
        """A predecessor submitted it: take up all tasks until it."""
        self._dataset.data_of(task_id)
        for _ in range(self._look_ahead):
            task = self._take()
            self._unsent.append(task)
            if task.task_id == task_id:
                return
        raise InvalidInput(f"the batch holds task {task_id}, which was trained on before: its group is refused")
