"""The journal's file: SQLite in WAL mode with `synchronous = FULL`, synchronous and single-threaded.

    groups, payloads   finished groups, ready (no step) or handed out (a step and a position)
    steps              what each step was like, by `lease` and `commit`
    ended              ids of rejected, quarantined and forgotten tasks: they stay known for ever
    failures           failed attempts of tasks that have not ended
    evaluations        what each whole evaluation came to
    meta               the format, the leader's fencing token

Every method runs inside its caller's transaction, which is on disk when it is committed.
"""

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
CREATE TABLE IF NOT EXISTS evaluations (id INTEGER PRIMARY KEY, record TEXT NOT NULL);
"""
FORMAT = "1"
SQLITE_PAGE_BYTES = 65_536
"""Of a new journal. A group of some hundred kilobytes is then a few pages instead of fifty: a third of the time."""


StoredGroup = tuple[bytes, dict[int, int]]
"""A serialized `headway.v1.Group`, and its gradient-carrying tokens by the step of the version that made them."""


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
    evaluations: list[dict[str, Any]]
    """In the order in which they ended."""


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
            self._db.execute(f"PRAGMA page_size = {SQLITE_PAGE_BYTES}")
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
        except BaseException:  # whatever it was: nothing of it is written, and it is raised again
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

    def lease(self, step: int, task_ids: Sequence[str], summary: dict[str, Any]) -> list[int]:
        """Hand out ready groups for a step; returns their record numbers, in order."""
        self._db.execute("INSERT INTO steps (step, summary) VALUES (?, ?)", (step, json.dumps(summary)))
        self._db.executemany(
            "UPDATE groups SET step = ?, position = ? WHERE task_id = ?",
            [(step, position, task_id) for position, task_id in enumerate(task_ids)],
        )
        return self.ids_of(step)

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

    def add_evaluation(self, record: dict[str, Any]) -> None:
        self._db.execute("INSERT INTO evaluations (record) VALUES (?)", (json.dumps(record),))

    def clear(self) -> None:
        """Forget everything but `meta`: a new run starts."""
        for table in ("groups", "payloads", "steps", "ended", "failures", "evaluations"):
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

    def payload(self, record_id: int) -> StoredGroup:
        """A group.

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
        token = int(self.get_meta("fencing_token", "0"))
        return Recovered(ready, list(self.steps()), ended, token, damaged, self.evaluations())

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

    def evaluations(self) -> list[dict[str, Any]]:
        """Every whole evaluation, in the order in which they ended."""
        rows = self._db.execute("SELECT record FROM evaluations ORDER BY id").fetchall()
        return [json.loads(record) for (record,) in rows]

    def _end_groups(self, condition: str, step: int) -> None:
        self._db.execute(
            f"INSERT OR IGNORE INTO ended SELECT task_id, 'consumed', '' FROM groups WHERE {condition}", (step,)
        )
        self._db.execute(f"DELETE FROM payloads WHERE id IN (SELECT id FROM groups WHERE {condition})", (step,))
        self._db.execute(f"DELETE FROM groups WHERE {condition}", (step,))
