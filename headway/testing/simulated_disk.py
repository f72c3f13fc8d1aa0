"""A journal without a thread, in the event loop's own time: writes in order, several to a transaction, lost by a kill.

It drives the real store (`services.rollout_controller.journal_store.JournalStore`, in memory), which survives the kill.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Store(Protocol):
    """What is on the disk."""

    def transaction(self) -> AbstractContextManager[None]: ...

    def known(self, task_ids: Sequence[str]) -> set[str]: ...

    def ids_of(self, step: int) -> list[int]: ...

    def payload(self, record_id: int) -> tuple[bytes, dict[int, int]]: ...


S = TypeVar("S", bound=Store)


class SimulatedJournal(Generic[S]):
    """What `Journal` does, for one life of a controller."""

    def __init__(self, store: S, latency_s: float) -> None:
        self._store = store
        self._latency_s = latency_s
        self._queued: list[tuple[Callable[[S], Any], asyncio.Future[Any]]] = []
        self._is_killed = False

    def write(self, operation: Callable[[S], T]) -> "asyncio.Future[T]":
        """Queue a write; what it raises is raised from the future."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._queued:
            loop.call_later(self._latency_s, self._flush)
        self._queued.append((operation, future))
        return future

    async def pages(
        self, step: int, record_ids: Sequence[int] = ()
    ) -> AsyncIterator[list[tuple[bytes, dict[int, int]]]]:
        """The groups of a step and their tokens by version, in order, one at a time."""
        for record_id in record_ids or await self.write(lambda store: store.ids_of(step)):
            yield [self._store.payload(record_id)]

    def kill(self, writes_first: bool) -> None:
        """Nothing is answered any more."""
        if writes_first:
            self._apply(self._queued)
        self._is_killed = True

    def _flush(self) -> None:
        if self._is_killed:
            return
        queued, self._queued = self._queued, []
        try:
            results = self._apply(queued)
        except Exception as error:  # noqa: BLE001 - as the writer's thread does: who waits for the write raises it
            for _, future in queued:
                future.set_exception(error)
            return
        for (_, future), result in zip(queued, results, strict=True):
            if not future.done():
                future.set_result(result)

    def _apply(self, queued: Sequence[tuple[Callable[[S], Any], "asyncio.Future[Any]"]]) -> list[Any]:
        with self._store.transaction():
            return [operation(self._store) for operation, _ in queued]


class SimulatedDisk(Generic[S]):
    """A store, and the journal of whoever lives now. A write takes `latency_s`."""

    def __init__(self, store: S, latency_s: float = 0.0) -> None:
        self.store = store
        self._latency_s = latency_s
        self._journal = self.open()

    def open(self) -> SimulatedJournal[S]:
        """A journal for a new life."""
        self._journal = SimulatedJournal(self.store, self._latency_s)
        return self._journal

    def kill(self, writes_first: bool) -> None:
        """End that life, before or after its last writes; in both cases before they are acknowledged."""
        self._journal.kill(writes_first)

    def known(self, task_ids: Sequence[str]) -> set[str]:
        return self.store.known(task_ids)
