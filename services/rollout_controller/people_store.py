"""What people ask of the journal: read by a connection and a thread of their own, so that nobody else waits for them.

    tasks          those that have a group, or have ended; the others are in memory alone
    statistics     of committed steps

Every query is bounded: it returns at most the number of rows that it is asked for.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
GROUPS = """
SELECT task_id, CASE WHEN step IS NULL THEN 'ready' WHEN is_committed THEN 'consumed' ELSE 'leased' END AS state,
    groups.attempt, step, '' AS detail, 'accepted' AS outcome, started_at, versions
    FROM groups LEFT JOIN steps USING (step)
"""
ENDED = """
SELECT task_id, state, NULL, NULL, detail,
    CASE state WHEN 'consumed' THEN 'accepted' WHEN 'rejected' THEN 'rejected'
        ELSE substr(detail, 1, instr(detail, ':') - 1) END AS outcome,
    NULL, '{}' FROM ended
"""
PAGE = """
task_id > :after AND (:state IS NULL OR state = :state) AND (:outcome IS NULL OR outcome = :outcome)
AND (:search = '' OR instr(task_id, :search)) ORDER BY task_id LIMIT :limit
"""
TASKS = " UNION ALL ".join(f"SELECT * FROM (SELECT * FROM ({part}) WHERE {PAGE})" for part in (GROUPS, ENDED))
TASK = " UNION ALL ".join(f"SELECT * FROM ({part}) WHERE task_id = :task_id" for part in (GROUPS, ENDED))
STEPS = "SELECT step, record FROM steps WHERE is_committed AND step >= ? ORDER BY step LIMIT ?"


@dataclass(frozen=True, slots=True)
class KeptTask:
    """A task as the journal knows it."""

    task_id: str
    state: str
    attempt: int | None
    step: int | None
    detail: str
    outcome: str
    started_at: int | None
    versions: dict[int, int]


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks are wanted."""

    state: str | None = None
    outcome: str | None = None
    search: str = ""
    """A part of the id."""

    def accepts(self, task_id: str, state: str, outcome: str | None) -> bool:
        is_wanted = self.state in (None, state) and self.outcome in (None, outcome)
        return is_wanted and self.search in task_id


class PeopleStore:
    """Reads a journal that is being written.

    Args:
        path: Of the journal; it exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal-people")
        self._db: sqlite3.Connection | None = None

    async def tasks(self, wanted: TaskFilter, after: str, limit: int) -> list[KeptTask]:
        """Tasks whose id is greater than `after`, in the order of their ids."""
        values = asdict(wanted) | {"after": after, "limit": limit}
        query = f"{TASKS} ORDER BY task_id LIMIT :limit"
        return await self._ask(lambda db: [_task(row) for row in db.execute(query, values)])

    async def task(self, task_id: str) -> KeptTask | None:
        """One task; None: it has neither a group nor an end."""
        rows = await self._ask(lambda db: db.execute(TASK, {"task_id": task_id}).fetchall())
        return _task(rows[0]) if rows else None

    async def statistics(self, since_step: int, limit: int) -> list[tuple[int, dict[str, float]]]:
        """Committed steps from `since_step` on, each with its statistics."""
        return await self._ask(lambda db: list(_statistics(db.execute(STEPS, (since_step, limit)))))

    async def _ask(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: query(self._connection()))

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA query_only = ON")
        return self._db

    async def close(self) -> None:
        if self._db is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()


@asynccontextmanager
async def people_store(path: Path) -> AsyncIterator[PeopleStore]:
    """A store that is closed when the block is left."""
    store = PeopleStore(path)
    try:
        yield store
    finally:
        await store.close()


def _task(row: tuple[Any, ...]) -> KeptTask:
    *values, counts = row
    values.append({int(version): count for version, count in json.loads(counts).items()})
    return KeptTask(*values)


def _statistics(rows: sqlite3.Cursor) -> Iterator[tuple[int, dict[str, float]]]:
    with closing(rows):
        for step, record in rows:
            yield step, json.loads(record).get("stats", {})
