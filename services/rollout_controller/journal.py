"""The journal of finished groups: what has been acknowledged survives `kill -9`.

`Journal` is the asynchronous shell of `JournalStore`: one thread writes, many operations to a transaction and an fsync
(group commit); another one reads, so that a long replay delays no write.

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
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from services.rollout_controller.journal_store import JournalBroken, JournalStore, StoredGroup

MAX_OPERATIONS = 256
"""Operations in one transaction, but for those that came in the same turn of the loop."""
PAGE_BYTES = 1 << 20
"""Groups that are read, and sent, at once."""
T = TypeVar("T")
Operation = Callable[[JournalStore], Any]
Entry = tuple[Operation, "asyncio.Future[Any]"]


class Journal:
    """The journal, for an event loop.

    Example:
        async with Journal(folder / "journal.sqlite") as journal:
            await journal.write(lambda store: store.append(record))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gathered: list[Entry] = []
        """Of this turn of the loop: they go to the writer together, so that a batch of groups is one fsync."""
        self._operations: queue.SimpleQueue[list[Entry] | None] = queue.SimpleQueue()
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
        self._hand_over()
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
        if not self._gathered:
            self._loop.call_soon(self._hand_over)
        self._gathered.append((operation, future))
        return future

    def _hand_over(self) -> None:
        if self._gathered:
            self._operations.put(self._gathered)
            self._gathered = []

    async def read(self, query: Callable[[JournalStore], T]) -> T:
        """Ask for what has been written, beside the writer."""
        return await self._loop.run_in_executor(self._readers, query, self._reader)

    async def pages(self, step: int, record_ids: Sequence[int] = ()) -> AsyncIterator[list[StoredGroup]]:
        """The groups of a step in order, about `PAGE_BYTES` of them at a time; sees all earlier writes. With the record
        numbers that `lease` returned, no write is waited for.

        Raises:
            JournalBroken: A group does not match its checksum.
        """
        record_ids = record_ids or await self.write(lambda store: store.ids_of(step))
        while record_ids:
            page = await self.read(partial(_page, record_ids))
            record_ids = record_ids[len(page) :]
            yield page

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
            batch, is_last = self._next_batch()
            if batch:
                outcomes = self._write_batch(batch)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(_answer, outcomes)
            if is_last:
                return

    def _next_batch(self) -> tuple[list[Entry], bool]:
        """What has come, and whether nothing comes any more; waits for something."""
        batch: list[Entry] = []
        gathered = self._operations.get()
        while gathered is not None:
            batch += gathered
            if len(batch) >= MAX_OPERATIONS or self._operations.empty():
                return batch, False
            gathered = self._operations.get()
        return batch, True

    def _write_batch(self, batch: Sequence[Entry]) -> list[tuple["asyncio.Future[Any]", Any]]:
        try:
            with self._store.transaction():
                results = [operation(self._store) for operation, _ in batch]
        except Exception as error:  # noqa: BLE001 - the thread must answer: who waits for the write raises it
            broken = JournalBroken(f"journal {self.path}: {type(error).__name__}: {error}")
            broken.__cause__ = error
            return [(future, broken) for _, future in batch]
        return [(future, result) for (_, future), result in zip(batch, results, strict=True)]


def _page(record_ids: Sequence[int], store: JournalStore) -> list[StoredGroup]:
    """The first of these groups: so many as make a page, at least one."""
    page, num_bytes = [], 0
    for record_id in record_ids:
        page.append(store.payload(record_id))
        num_bytes += len(page[-1][0])
        if num_bytes >= PAGE_BYTES:
            break
    return page


def _answer(outcomes: Sequence[tuple["asyncio.Future[Any]", Any]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, JournalBroken):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
