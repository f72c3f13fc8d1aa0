"""Tasks for people, a page at a time: those that go on from the account, those with a group or an end from the journal.

Pages are in the order of ids, as text. A page is no snapshot: a task that ends meanwhile is seen as it was or as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from headway.core.ledger import Failure, Ledger, TaskRecord, TaskState
from headway.core.trajectory import Outcome
from headway.errors import NotFound
from services.rollout_controller.people_store import KeptTask, PeopleStore, TaskFilter
from services.rollout_controller.status import failures
from services.rollout_controller.views import TaskDetail, TaskPage, TaskSummary

WITH_GROUP = (TaskState.READY, TaskState.LEASED)


@dataclass(frozen=True, slots=True)
class TaskPages:
    """The tasks of a run.

    Args:
        ledger: The account of the run, which a new run replaces.
        store: The journal.
    """

    ledger: Callable[[], Ledger]
    store: PeopleStore

    async def page(self, wanted: TaskFilter, after: str, limit: int) -> TaskPage:
        """Tasks whose id is greater than `after`."""
        kept = await self.store.tasks(wanted, after, limit)
        end = kept[-1].task_id if len(kept) == limit else None
        found = {task.task_id: _summary_of_kept(task) for task in kept}
        for summary in self._open_between(after, end):
            found.pop(summary.task_id, None)
            if wanted.accepts(summary.task_id, summary.state, summary.outcome):
                found[summary.task_id] = summary
        ordered = sorted(found)
        shown = ordered[:limit]
        return TaskPage(tasks=[found[name] for name in shown], next=shown[-1] if len(ordered) > limit else end)

    def _open_between(self, after: str, end: str | None) -> Iterator[TaskSummary]:
        """Tasks that go on, with ids greater than `after`, and not greater than `end`."""
        steps = self._steps()
        for task_id, record in self.ledger().records.items():
            if task_id > after and (end is None or task_id <= end):
                yield _summary_of_record(record, steps.get(task_id))

    async def detail(self, task_id: str) -> TaskDetail:
        """
        Raises:
            NotFound: No such task is known.
        """
        kept, ledger = await self.store.task(task_id), self.ledger()
        record = ledger.records.get(task_id)
        if record is not None:
            summary = _summary_of_record(record, self._steps().get(task_id))
            return _detail(summary, record.started_at if record.attempt else None, record.versions, record.history)
        if kept is None:
            raise NotFound(f"no task {task_id} is known")
        history = ledger.quarantined.get(task_id, [])
        return _detail(_summary_of_kept(kept, len(history)), kept.started_at, kept.versions, history)

    def _steps(self) -> dict[str, int]:
        """The step of each task that is handed out."""
        batches = self.ledger().batches.values()
        return {task_id: batch.step for batch in batches if not batch.is_committed for task_id in batch.task_ids}


def _detail(
    summary: TaskSummary, started_step: int | None, versions: Mapping[int, int], history: list[Failure]
) -> TaskDetail:
    return TaskDetail(
        **dict(summary), started_step=started_step, tokens_by_version=dict(versions), failures=failures(history)
    )


def _summary_of_record(record: TaskRecord, step: int | None) -> TaskSummary:
    last = record.history[-1] if record.history else None
    outcome = Outcome.ACCEPTED if record.state in WITH_GROUP else last.outcome if last else None
    return TaskSummary(
        task_id=record.task_id,
        state=record.state.value,
        num_attempts=record.attempt,
        outcome=outcome,
        step=step,
        detail=last.message if last and outcome is not Outcome.ACCEPTED else "",
    )


def _summary_of_kept(task: KeptTask, num_attempts: int = 0) -> TaskSummary:
    return TaskSummary(
        task_id=task.task_id,
        state=task.state,
        num_attempts=task.attempt or num_attempts,
        outcome=task.outcome or None,
        step=task.step,
        detail=task.detail,
    )
