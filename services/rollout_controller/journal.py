"""The journal of finished groups: what has been acknowledged survives `kill -9`.

SQLite in WAL mode with `synchronous = FULL`: a transaction is on disk when it is committed. `JournalStore` is the file,
synchronous and single-threaded. `Journal` is its asynchronous shell: one thread writes, many operations to a
transaction and an fsync (group commit); another one reads, so that a long replay delays no write.

    append   a group, its row, its versions              before it counts as ready
    lease    which groups a step was given, in order     before they are handed out
    commit   the step has consumed them                  before the reply
    end      a task was rejected or quarantined          its id stays known

Guarantee: an awaited write is on disk. Each payload carries a checksum over itself and its task's name; a record that
does not match is never handed out. A lock, gone with its process, keeps a second controller out. Ids of ended tasks are
kept for ever (one short row each), payloads until `forget_before` passes them.
"""

import asyncio
import contextlib
import fcntl
import json
import queue
import sqlite3
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headway.core.ledger import Failure, TaskState
from headway.core.trajectory import Outcome
from headway.errors import HeadwayError

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, attempt INTEGER NOT NULL, started_at INTEGER NOT NULL,
    versions TEXT NOT NULL, step INTEGER, position INTEGER
);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step, position);
CREATE TABLE IF NOT EXISTS payloads (id INTEGER PRIMARY KEY, data BLOB NOT NULL, payload BLOB NOT NULL, crc INTEGER
NOT NULL); CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, summary TEXT NOT NULL, is_committed INTEGER NOT NULL DEFAULT 0, record TEXT NOT NULL
    DEFAULT '{}'
);
CREATE TABLE IF NOT EXISTS ended (task_id TEXT PRIMARY KEY, state TEXT NOT NULL, detail TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (task_id TEXT NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL, message
TEXT NOT NULL); CREATE INDEX IF NOT EXISTS failures_by_task ON failures (task_id);
"""
FORMAT = "1"
MAX_OPERATIONS = 256
"""Operations in one transaction."""
T = TypeVar("T")
Operation = Callable[["JournalStore"], Any]


class JournalBroken(HeadwayError):
    """The journal cannot be read or written; the message says where and why."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A finished group as it is written."""

    task_id: str
    attempt: int
    started_at: int
    versions: dict[int, int]
    """Gradient-carrying tokens by the step of the version that made them."""
    data: bytes
    """The task's row, so that it can be queued again."""
    payload: bytes
    """The group, a serialized `headway.v1.Group`."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step that was given a batch."""

    step: int
    task_ids: tuple[str, ...]
    is_committed: bool
    summary: dict[str, Any]
    """What the batch was like, from `lease`."""
    record: dict[str, Any]
    """What the step was like, from `commit`."""


@dataclass(frozen=True, slots=True)
class ReadyRecord:
    """A group that was finished and not handed out."""

    task_id: str
    attempt: int
    started_at: int
    versions: dict[int, int]
    data: bytes


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a journal holds when it is opened."""

    ready: list[ReadyRecord]
    steps: list[StoredStep]
    num_ended: dict[TaskState, int]
    fencing_token: int
    damaged: list[str]
    """Tasks whose ready group did not match its checksum and was dropped."""


def _versions(text: str) -> dict[int, int]:
    return {int(version): count for version, count in json.loads(text).items()}


def checksum(task_id: str, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(task_id.encode()))


class JournalStore:
    """The file. Not thread-safe; every method runs inside the caller's transaction."""

    def __init__(self, path: Path | str) -> None:
        """Open or make the journal.

        Raises:
            JournalBroken: The file cannot be opened, is no journal, or one of another format.
        """
        self.path = str(path)
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise JournalBroken(f"journal {self.path}: {error}") from error
        found = self.get_meta("format", FORMAT)
        if found != FORMAT:
            raise JournalBroken(f"journal {self.path} has format {found}, this version reads {FORMAT}; move it away")
        self.set_meta("format", FORMAT)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and on disk when the block is left."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- writes

    def append(self, record: GroupRecord) -> None:
        cursor = self._db.execute(
            "INSERT INTO groups (task_id, attempt, started_at, versions) VALUES (?, ?, ?, ?)",
            (record.task_id, record.attempt, record.started_at, json.dumps(record.versions)),
        )
        crc = checksum(record.task_id, record.payload)
        self._db.execute(
            "INSERT INTO payloads VALUES (?, ?, ?, ?)", (cursor.lastrowid, record.data, record.payload, crc)
        )

    def discard(self, task_ids: Iterable[str]) -> None:
        """Drop ready groups; their tasks are not known any more."""
        for task_id in task_ids:
            self._db.execute("DELETE FROM payloads WHERE id = (SELECT id FROM groups WHERE task_id = ?)", (task_id,))
            self._db.execute("DELETE FROM groups WHERE task_id = ?", (task_id,))

    def lease(self, step: int, task_ids: Sequence[str], summary: dict[str, Any]) -> None:
        self._db.execute("INSERT INTO steps (step, summary) VALUES (?, ?)", (step, json.dumps(summary)))
        self._db.executemany(
            "UPDATE groups SET step = ?, position = ? WHERE task_id = ?",
            [(step, position, task_id) for position, task_id in enumerate(task_ids)],
        )

    def commit(self, step: int, record: dict[str, Any]) -> None:
        self._db.execute("UPDATE steps SET is_committed = 1, record = ? WHERE step = ?", (json.dumps(record), step))

    def skip(self, step: int) -> None:
        """The step made no version: its groups have ended, and it may be given other ones."""
        self._end_groups("step = ?", step)
        self._db.execute("DELETE FROM steps WHERE step = ?", (step,))

    def forget_before(self, step: int) -> None:
        """Drop the payloads of committed steps before `step`; the record of each step stays."""
        self._end_groups("step IN (SELECT step FROM steps WHERE step < ? AND is_committed)", step)

    def end(self, task_id: str, state: TaskState, detail: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO ended VALUES (?, ?, ?)", (task_id, state.value, detail))
        self._db.execute("DELETE FROM failures WHERE task_id = ?", (task_id,))

    def fail(self, failure: Failure) -> None:
        row = (failure.task_id, failure.attempt, failure.outcome.value, failure.message)
        self._db.execute("INSERT INTO failures VALUES (?, ?, ?, ?)", row)

    def clear(self) -> None:
        """Forget everything but the fencing token: a new run starts."""
        for table in ("groups", "payloads", "steps", "ended", "failures"):
            self._db.execute(f"DELETE FROM {table}")

    def set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # ---- reads

    def get_meta(self, key: str, default: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else default

    def known(self, task_ids: Sequence[str]) -> set[str]:
        """Those of the tasks that have a group here or have ended."""
        wanted = json.dumps(list(task_ids))
        rows = self._db.execute(
            "SELECT task_id FROM groups WHERE task_id IN (SELECT value FROM json_each(?1)) UNION ALL "
            "SELECT task_id FROM ended WHERE task_id IN (SELECT value FROM json_each(?1))",
            (wanted,),
        )
        return {row[0] for row in rows}

    def failures(self, task_ids: Sequence[str]) -> list[Failure]:
        """The failed attempts of those of the tasks that have not ended."""
        query = "SELECT * FROM failures WHERE task_id IN (SELECT value FROM json_each(?)) ORDER BY rowid"
        rows = self._db.execute(query, (json.dumps(list(task_ids)),))
        return [Failure(task_id, attempt, Outcome(outcome), message) for task_id, attempt, outcome, message in rows]

    def ids_of(self, step: int) -> list[int]:
        """Record numbers of a step's groups, in order."""
        return [row[0] for row in self._db.execute("SELECT id FROM groups WHERE step = ? ORDER BY position", (step,))]

    def payload(self, record_id: int) -> tuple[bytes, dict[int, int]]:
        """A group's bytes, and its tokens by version.

        Raises:
            JournalBroken: They do not match their checksum.
        """
        task_id, versions, payload, crc = self._db.execute(
            "SELECT task_id, versions, payload, crc FROM groups JOIN payloads USING (id) WHERE id = ?", (record_id,)
        ).fetchone()
        if checksum(task_id, payload) != crc:
            raise JournalBroken(f"journal {self.path}: the group of task {task_id} does not match its checksum")
        return bytes(payload), _versions(versions)

    def recover(self) -> Recovered:
        """Read everything; ready groups that are damaged are dropped, so that their tasks can be done again."""
        damaged = [name for name, *_, payload, crc in self._ready_rows() if checksum(name, payload) != crc]
        self.discard(damaged)
        ready = [
            ReadyRecord(name, attempt, started_at, _versions(versions), bytes(data))
            for name, attempt, started_at, versions, data, _, _ in self._ready_rows()
        ]
        ended = {
            TaskState(state): count
            for state, count in self._db.execute("SELECT state, count(*) FROM ended GROUP BY state")
        }
        return Recovered(ready, list(self.steps()), ended, int(self.get_meta("fencing_token", "0")), damaged)

    def _ready_rows(self) -> Iterator[tuple[Any, ...]]:
        return self._db.execute(
            "SELECT task_id, attempt, started_at, versions, data, payload, crc FROM groups JOIN payloads USING (id) "
            "WHERE step IS NULL ORDER BY id"
        )

    def steps(self) -> Iterator[StoredStep]:
        """Every step that was given a batch, in order; those that were skipped are gone."""
        for step, summary, is_committed, record in self._db.execute("SELECT * FROM steps ORDER BY step").fetchall():
            rows = self._db.execute("SELECT task_id FROM groups WHERE step = ? ORDER BY position", (step,))
            task_ids = tuple(row[0] for row in rows)
            yield StoredStep(step, task_ids, bool(is_committed), json.loads(summary), json.loads(record))

    def _end_groups(self, condition: str, step: int) -> None:
        self._db.execute(
            f"INSERT OR IGNORE INTO ended SELECT task_id, 'consumed', '' FROM groups WHERE {condition}", (step,)
        )
        self._db.execute(f"DELETE FROM payloads WHERE id IN (SELECT id FROM groups WHERE {condition})", (step,))
        self._db.execute(f"DELETE FROM groups WHERE {condition}", (step,))


class Journal:
    """The journal, for an event loop.

    Example:
        async with Journal(folder / "journal.sqlite") as journal:
            await journal.write(lambda store: store.append(record))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._operations: queue.SimpleQueue[tuple[Operation, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="journal-read")
        self._writer: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    async def __aenter__(self) -> "Journal":
        """Open the journal.

        Raises:
            JournalBroken: It cannot be opened, or another process has it.
        """
        await self._loop.run_in_executor(self._readers, self._open)
        self._writer = threading.Thread(target=self._write_all, name="journal-write", daemon=True)
        self._writer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Write what is queued, then close."""
        self._is_closed = True
        self._operations.put(None)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.join)
        self._readers.shutdown()
        self._store.close()
        self._reader.close()
        self._lock.close()

    def write(self, operation: Callable[[JournalStore], T]) -> "asyncio.Future[T]":
        """Queue a write, in order; the future is done when it is on disk.

        Raises (from the future):
            JournalBroken: It could not be written; nothing of it was.
        """
        if self._is_closed:
            raise JournalBroken(f"journal {self.path} is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._operations.put((operation, future))
        return future

    async def read(self, query: Callable[[JournalStore], T]) -> T:
        """Ask for what has been written, beside the writer."""
        return await self._loop.run_in_executor(self._readers, query, self._reader)

    async def payloads(self, step: int, num_at_once: int = 8) -> AsyncIterator[tuple[bytes, dict[int, int]]]:
        """The groups of a step and their tokens by version, in order, a few in memory at a time; sees all
        earlier writes.

        Raises:
            JournalBroken: A group does not match its checksum.
        """
        record_ids = await self.write(lambda store: store.ids_of(step))
        for start in range(0, len(record_ids), num_at_once):
            wanted = record_ids[start : start + num_at_once]
            for found in await self.read(partial(_payloads, wanted)):
                yield found

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self.path.with_suffix(".lock").open("w")
        except OSError as error:
            raise JournalBroken(f"journal {self.path}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._store, self._reader = JournalStore(self.path), JournalStore(self.path)
        except BlockingIOError as error:
            self._lock.close()
            raise JournalBroken(f"journal {self.path} is in use: another rollout controller runs this trial") from error
        except JournalBroken:
            self._lock.close()
            raise

    def _write_all(self) -> None:
        """The writer's thread: take what has come, write it in one transaction, then answer."""
        while True:
            batch = self._next_batch()
            outcomes = self._write_batch([entry for entry in batch if entry is not None])
            if outcomes:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(_answer, outcomes)
            if None in batch:
                return

    def _next_batch(self) -> list[tuple[Operation, "asyncio.Future[Any]"] | None]:
        batch = [self._operations.get()]
        while batch[-1] is not None and len(batch) < MAX_OPERATIONS:
            try:
                batch.append(self._operations.get_nowait())
            except queue.Empty:
                break
        return batch

    def _write_batch(
        self, batch: Sequence[tuple[Operation, "asyncio.Future[Any]"]]
    ) -> list[tuple["asyncio.Future[Any]", Any]]:
        if not batch:
            return []
        try:
            with self._store.transaction():
                results = [operation(self._store) for operation, _ in batch]
        except Exception as error:  # noqa: BLE001 - the thread must answer: who waits for the write raises it
            broken = JournalBroken(f"journal {self.path}: {type(error).__name__}: {error}")
            broken.__cause__ = error
            return [(future, broken) for _, future in batch]
        return [(future, result) for (_, future), result in zip(batch, results, strict=True)]


def _payloads(record_ids: Sequence[int], store: JournalStore) -> list[tuple[bytes, dict[int, int]]]:
    return [store.payload(record_id) for record_id in record_ids]


def _answer(outcomes: Sequence[tuple["asyncio.Future[Any]", Any]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, JournalBroken):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
