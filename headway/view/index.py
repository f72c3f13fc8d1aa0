"""Which samples the dumps of a run hold, and where: SQLite beside them, made from the files alone.

    {step}/samples.jsonl --catch_up--> samples, groups        {step}/trained.jsonl --catch_up--> trained --> groups

`files` says how far each file has been read. The controller catches up after every write, so that a run of any length
opens at once; whoever opens a folder without an index catches up first. Any number of processes may: each takes the
write lock before it looks how far the others came.

Guarantee: every whole line is in the index once, however often and from wherever it is caught up with.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from headway.view.folder import SAMPLES, TRAINED
from headway.view.lines import Head, heads
from headway.view.schema import SCHEMA

PROMPT_CHARACTERS = 240
LINES_IN_TRANSACTION = 20_000
BUSY_TIMEOUT_S = 30.0


class Index:
    """The index of one run. Each call opens the file anew: any thread may call.

    Args:
        path: The file.
        roots: Roots of the dumps by kind, `train` and `evaluation`.
    """

    def __init__(self, path: Path, roots: Mapping[str, Path]) -> None:
        self._path = path
        self._roots = roots
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.open() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading."""
        with closing(sqlite3.connect(self._path, BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA synchronous = OFF")  # it can be made again
            yield connection

    def catch_up(self) -> None:
        """Take in whatever the files hold by now."""
        with self.open() as connection:
            stamps = dict(connection.execute("SELECT name, stamp FROM files").fetchall())
            for kind, root in self._roots.items():
                changed = {file.step for file in _files(kind, root) if stamps.get(file.name) != file.stamp()}
                _catch_up(connection, kind, root, sorted(changed))

    def catch_up_with(self, written: Iterable[Path]) -> None:
        """Take in files of samples that have just grown, and what the trainer has written since."""
        with self.open() as connection:
            for kind, root in self._roots.items():
                steps = {int(path.parent.name) for path in written if path.parent.parent == root}
                expected = _expected_steps(connection, root) if kind == "train" else set()
                _catch_up(connection, kind, root, sorted(steps | expected))

    def unread_bytes(self) -> int:
        """How much `catch_up` has still to read."""
        with self.open() as connection:
            known = dict(connection.execute("SELECT name, known_bytes FROM files").fetchall())
        files = [file for kind, root in self._roots.items() for file in _files(kind, root)]
        return sum(max(0, file.path.stat().st_size - known.get(file.name, 0)) for file in files)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a dump. Its name says nothing of where the run lies: folders of runs are moved."""

    kind: str
    root: Path
    step: int
    base: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.step}/{self.base}"

    @property
    def path(self) -> Path:
        return self.root / str(self.step) / self.base

    def stamp(self) -> str:
        """Changes when the file does."""
        status = self.path.stat()
        return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def steps_in(root: Path) -> list[int]:
    """The steps that there are folders of, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def _expected_steps(connection: sqlite3.Connection, root: Path) -> set[int]:
    """Steps that the trainer may have written since, next to the last one that is known."""
    last = connection.execute("SELECT ifnull(max(step), -1) FROM trained").fetchone()[0]
    steps = {last}
    while (root / str(last + 1) / TRAINED).exists():
        last += 1
        steps.add(last)
    return steps - {-1}


def _catch_up(connection: sqlite3.Connection, kind: str, root: Path, steps: Sequence[int]) -> None:
    for step in steps:
        while _take_samples(connection, File(kind, root, step, SAMPLES)):
            pass
    for step in steps if kind == "train" else ():
        _take_trained(connection, File(kind, root, step, TRAINED))


def _files(kind: str, root: Path) -> Iterator[File]:
    for step in steps_in(root):
        for base in (SAMPLES, TRAINED):
            if (file := File(kind, root, step, base)).path.exists():
                yield file


@contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:  # nothing of it is written, and it is raised again
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _is_read(connection: sqlite3.Connection, file: File) -> bool:
    """Whether a file is known to its end; also where there is none."""
    if not file.path.exists():
        return True
    found = connection.execute("SELECT stamp FROM files WHERE name = ?", (file.name,)).fetchone()
    return found is not None and found["stamp"] == file.stamp()


def _note(connection: sqlite3.Connection, file: File, end: int, stamp: str) -> None:
    connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (file.name, end, stamp))


def _take_samples(connection: sqlite3.Connection, file: File) -> bool:
    """Take in the next lines of a file; whether there may be more of them."""
    if _is_read(connection, file):
        return False
    with _writing(connection):
        found = connection.execute("SELECT known_bytes FROM files WHERE name = ?", (file.name,)).fetchone()
        start, stamp = found["known_bytes"] if found else 0, file.stamp()
        lines = list(islice(heads(file.path, start), LINES_IN_TRANSACTION))
        is_end = len(lines) < LINES_IN_TRANSACTION
        _insert_samples(connection, file, lines)
        end = lines[-1].offset + lines[-1].size if lines else start
        _note(connection, file, end, stamp if is_end else "")
    return not is_end


def _insert_samples(connection: sqlite3.Connection, file: File, lines: Sequence[Head]) -> None:
    rows: list[tuple[Any, ...]] = []
    group_id, group_key = 0, None
    for line in lines:
        key = (line.values["task_id"], line.values["attempt"])
        if line.values["sample"] == 0 or key != group_key:
            group_id, group_key = _group_of(connection, file, line.values), key
        rows.append((group_id, *_sample_row(line)))
    connection.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    if rows:
        first = (min(row[0] for row in rows),)
        _summarize(connection, first)
        _mark_consumed(connection, "SELECT task_id FROM groups WHERE id >= ?", first)


def _group_of(connection: sqlite3.Connection, file: File, values: Mapping[str, Any]) -> int:
    """The id of a line's group: a new one with its first sample, else the one whose lines were cut apart."""
    task_id, attempt = values["task_id"], values["attempt"]
    if values["sample"] > 0:
        found = connection.execute(
            "SELECT max(id) FROM groups WHERE task_id = ? AND attempt = ? AND kind = ? AND step = ?",
            (task_id, attempt, file.kind, file.step),
        ).fetchone()[0]
        if found is not None:
            return int(found)
    prompt = values["prompt"][:PROMPT_CHARACTERS]
    made = connection.execute(
        "INSERT INTO groups (kind, step, task_id, attempt, outcome, prompt) VALUES (?, ?, ?, ?, ?, ?)",
        (file.kind, file.step, task_id, attempt, values["outcome"], prompt),
    )
    assert made.lastrowid is not None
    return made.lastrowid


def _sample_row(line: Head) -> tuple[Any, ...]:
    values = line.values
    names = ("sample", "reward", "num_loss_tokens", "seqlen", "version_min", "version_max", "stop_reason")
    return (*(values[name] for name in names), line.offset, line.size)


def _summarize(connection: sqlite3.Connection, first: tuple[int]) -> None:
    """Fill in the numbers of the groups from `first` on."""
    connection.execute(
        """UPDATE groups SET num_samples = s.n, reward = s.r, reward_min = s.r0, reward_max = s.r1, length = s.l,
               length_max = s.l1, version_min = s.v0, version_max = s.v1
           FROM (SELECT group_id, count(*) n, avg(reward) r, min(reward) r0, max(reward) r1, avg(length) l,
                        max(length) l1, min(version_min) v0, max(version_max) v1
                 FROM samples WHERE group_id >= ? GROUP BY group_id) s
           WHERE id = s.group_id""",
        first,
    )


def _take_trained(connection: sqlite3.Connection, file: File) -> None:
    """Take in what the trainer wrote of a step: a file that is complete when it appears, and replaced as a whole."""
    if _is_read(connection, file):
        return
    with _writing(connection):
        stamp, lines, step = file.stamp(), list(heads(file.path, 0)), file.step
        if connection.execute("DELETE FROM trained WHERE step = ?", (step,)).rowcount:
            connection.execute(
                "UPDATE groups SET consumed_step = NULL, staleness = NULL WHERE consumed_step = ?", (step,)
            )
        rows = [(line.values["task_id"], line.values["sample"], step, line.offset, line.size) for line in lines]
        connection.executemany("INSERT OR REPLACE INTO trained VALUES (?, ?, ?, ?, ?)", rows)
        _mark_consumed(connection, "SELECT DISTINCT task_id FROM trained WHERE step = ?", (step,))
        _note(connection, file, sum(line.size for line in lines), stamp)


def _mark_consumed(connection: sqlite3.Connection, tasks: str, parameters: tuple[Any, ...]) -> None:
    """Note at the last accepted group of each task in `tasks`, a query, which step trained on it."""
    connection.execute(
        f"""UPDATE groups SET consumed_step = t.step, staleness = t.step - version_min
            FROM (SELECT task_id, max(step) step FROM trained WHERE task_id IN ({tasks}) GROUP BY task_id) t
            WHERE id = (SELECT max(id) FROM groups g
                        WHERE g.task_id = t.task_id AND g.kind = 'train' AND g.outcome = 'accepted')""",
        parameters,
    )
