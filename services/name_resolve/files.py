"""The store in a folder that several machines share (`nfs`): no server, no lock that a dead process could hold.

    states/00000000000000000007    everything as of revision 7, and the changes of the last revisions
    leases/00000000002a41f3        its time to live; its modification time says when it was last kept

A transaction reads the newest state, writes the next one aside, fsyncs it, and links it to the next number: link(2)
fails when somebody was faster, on a shared folder too, and then it begins again. Readers take the highest number.

Guarantee: a state is there whole or not at all, and each follows from the one before it. A writer that slept through so
many revisions that its number had been used and cleared away finds out, because the history names each writer.

Times are the file server's: they are compared with a file touched just then, never with this machine's clock.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from headway.errors import InvalidInput, Unavailable
from services.name_resolve.store import (
    Change,
    Changes,
    Guard,
    Item,
    LeaseLapsed,
    News,
    Outcome,
    Put,
    Store,
    View,
    Write,
)
from services.name_resolve.tree import Tree

T = TypeVar("T")
TIMEOUT_S = 5.0
POLL_S = 0.05
"""How often a change made by another process is looked for."""
REAP_S = 0.25
NUM_KEPT = 16
"""States that stay for slow readers."""
NUM_REMEMBERED = 256
FIRST = 1


@dataclass
class State:
    """The tree as of one revision, and who wrote each revision that is remembered."""

    tree: Tree
    writers: dict[int, str] = field(default_factory=dict)


class FileStore:
    """A shared folder."""

    def __init__(self, root: Path, timeout_s: float = TIMEOUT_S) -> None:
        """
        Args:
            root: The folder; made if it is not there.
            timeout_s: Longest that any call takes, seconds.
        """
        self._folder = Folder(root)
        self._timeout_s = timeout_s
        self._disk = ThreadPoolExecutor(1, "names on disk")
        self._changed = asyncio.Event()
        self._seen = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        if not str(self._folder.root).strip("."):
            raise InvalidInput("cluster.name_resolve.nfs_record_root is missing: a folder that every machine sees")
        await self._on_disk("open", self._folder.make)
        await self._on_disk("drop lapsed leases", self._folder.reap)
        tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._reap())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._disk.shutdown(wait=False)

    async def get(self, *keys: str) -> View:
        return (await self._on_disk("read", self._folder.newest)).tree.get(*keys)

    async def below(self, prefix: str) -> View:
        return (await self._on_disk("read", self._folder.newest)).tree.below(prefix)

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        deadline = time.monotonic() + self._timeout_s
        outcome = await self._on_disk("write", lambda: self._folder.transact(guards, writes, deadline))
        self._tell(outcome.revision)
        return outcome

    async def grant(self, ttl_s: float) -> int:
        return await self._on_disk("grant a lease", lambda: self._folder.grant(ttl_s))

    async def keep_alive(self, lease_id: int) -> float:
        return await self._on_disk("keep a lease", lambda: self._folder.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._on_disk("revoke a lease", lambda: self._folder.revoke(lease_id))

    async def watch(self, prefix: str, after: int) -> News:
        """See `Store.watch`. Waits for: the next state; unblocked by: a write here, or the next look at the folder."""
        revision = after
        while True:
            changed = self._changed
            tree = (await self._again("read", self._folder.newest)).tree
            news = tree.below(prefix) if revision > tree.revision else tree.changes_after(revision, prefix)
            if news is None:
                await changed.wait()
                continue
            revision = news.revision
            if isinstance(news, View) or news.changes:
                yield news

    async def _poll(self) -> None:
        """Waits for: nothing but the clock, since no file system tells of another machine's changes."""
        while True:
            self._tell(await self._again("look for changes", self._folder.newest_revision))
            await asyncio.sleep(POLL_S)

    async def _reap(self) -> None:
        while True:
            await self._again("drop lapsed leases", self._folder.reap)
            await asyncio.sleep(REAP_S)

    def _tell(self, revision: int) -> None:
        if revision != self._seen:
            self._seen = revision
            self._changed.set()
            self._changed = asyncio.Event()

    async def _again(self, what: str, call: Callable[[], T]) -> T:
        """`_on_disk` for a task that has nobody to complain to: it goes on until the folder answers."""
        while True:
            with suppress(Unavailable):
                return await self._on_disk(what, call)
            await asyncio.sleep(REAP_S)

    async def _on_disk(self, what: str, call: Callable[[], T]) -> T:
        """Run a call beside the loop; one after the other.

        Raises:
            Unavailable: The folder does not answer in time, or refuses.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._disk, call)
        except TimeoutError as error:
            raise Unavailable(f"{what}: {self._folder.root} does not answer") from error
        except OSError as error:
            raise Unavailable(f"{what}: {self._folder.root}: {error.strerror or error}") from error


class Folder:
    """The files. Its methods block, and are called by one thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._states = root / "states"
        self._leases = root / "leases"
        self._aside = root / "aside"
        self._cached = State(Tree(0))

    def make(self) -> None:
        """Make the folders and the first state, unless they are there."""
        for folder in (self._states, self._leases, self._aside):
            folder.mkdir(parents=True, exist_ok=True)
        if not self._revisions():
            self._link(State(Tree(FIRST)))

    def newest_revision(self) -> int:
        return max(self._revisions(), default=0)

    def newest(self) -> State:
        """The newest state. One that is cleared away while it is read was not the newest any more."""
        while True:
            revision = self.newest_revision()
            if revision == self._cached.tree.revision:
                return self._cached
            with suppress(FileNotFoundError):
                self._cached = _parse((self._states / f"{revision:020d}").read_bytes())
                return self._cached

    def transact(self, guards: Sequence[Guard], writes: Sequence[Write], deadline: float) -> Outcome:
        """See `Store.transact`."""
        while True:
            for write in writes:
                if isinstance(write, Put) and write.lease_id and not self._lease(write.lease_id).exists():
                    raise LeaseLapsed(f"lease {write.lease_id:x} has lapsed")
            before = self.newest()
            tree = before.tree.copy()
            outcome = tree.transact(guards, writes)
            if tree.revision == before.tree.revision or self._link(State(tree, dict(before.writers))):
                return outcome
            if time.monotonic() > deadline:
                raise Unavailable(f"others write to {self.root} all the time")

    def grant(self, ttl_s: float) -> int:
        lease_id = secrets.randbits(62) + 1
        self._write_aside(str(ttl_s).encode()).rename(self._lease(lease_id))
        return lease_id

    def keep_alive(self, lease_id: int) -> float:
        """Touch the lease, unless its time was over: then it is gone, whoever notices first."""
        path = self._lease(lease_id)
        try:
            ttl_s, kept_at = float(path.read_text()), path.stat().st_mtime
            os.utime(path)
            if path.stat().st_mtime - kept_at <= ttl_s:
                return ttl_s
        except FileNotFoundError:
            pass
        path.unlink(missing_ok=True)
        raise LeaseLapsed(f"lease {lease_id:x} has lapsed")

    def revoke(self, lease_id: int) -> None:
        self._lease(lease_id).unlink(missing_ok=True)
        self._drop_orphans()

    def reap(self) -> None:
        """End the leases whose time is over, then delete the keys of leases that are not there."""
        for path in list(self._leases.iterdir()):
            if self._is_lapsed(path):
                path.unlink(missing_ok=True)
        self._drop_orphans()

    def _is_lapsed(self, path: Path) -> bool:
        try:
            return float(path.read_text()) < self._now() - path.stat().st_mtime
        except (FileNotFoundError, ValueError):
            return False

    def _drop_orphans(self) -> None:
        """The state is read first: a lease that it names and that is not there afterwards is gone for good."""
        while True:
            before = self.newest()
            held = {item.lease_id for item in before.tree.items.values() if item.lease_id}
            gone = [lease_id for lease_id in held if not self._lease(lease_id).exists()]
            if not gone:
                return
            tree = before.tree.copy()
            tree.drop_leases(gone)
            self._link(State(tree, dict(before.writers)))

    def _link(self, state: State) -> bool:
        """Make a state the newest one; False: somebody was faster, or this writer had slept too long.

        Raises:
            Unavailable: It slept so long that nobody remembers whether it was done.
        """
        revision, writer = state.tree.revision, secrets.token_hex(8)
        state.writers[revision] = writer
        aside, path = self._write_aside(_dump(state)), self._states / f"{revision:020d}"
        try:
            os.link(aside, path)
        except FileExistsError:
            if aside.stat().st_nlink != 2:  # a server may have done it, and said so only to the first of two requests
                return False
        finally:
            aside.unlink()
        _fsync(self._states)
        return self._is_in_line(path, revision, writer)

    def _is_in_line(self, path: Path, revision: int, writer: str) -> bool:
        """Whether the state that was linked is the one that follows: certain, unless its number was used before."""
        newest = self.newest_revision()
        if revision > newest - NUM_KEPT:
            self._clear(newest)
            return True
        writers = self.newest().writers
        path.unlink(missing_ok=True)
        if revision not in writers:
            raise Unavailable(f"this process slept for {newest - revision} revisions while it wrote one to {self.root}")
        return writers[revision] == writer

    def _clear(self, newest: int) -> None:
        for revision in self._revisions():
            if revision <= newest - NUM_KEPT:
                (self._states / f"{revision:020d}").unlink(missing_ok=True)

    def _revisions(self) -> list[int]:
        return [int(name) for name in os.listdir(self._states)]

    def _lease(self, lease_id: int) -> Path:
        return self._leases / f"{lease_id:016x}"

    def _write_aside(self, data: bytes) -> Path:
        path = self._aside / secrets.token_hex(8)
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return path

    def _now(self) -> float:
        """The file server's time."""
        clock = self._aside / "clock"
        clock.touch()
        return clock.stat().st_mtime


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dump(state: State) -> bytes:
    tree = state.tree
    items = [_fields(item) for item in tree.items.values()]
    history = [
        [
            changes.revision,
            state.writers.get(changes.revision, ""),
            [_change_fields(change) for change in changes.changes],
        ]
        for changes in list(tree.history)[-NUM_REMEMBERED:]
    ]
    forgotten = tree.history[-len(history)].revision - 1 if history else tree.revision
    return orjson.dumps({"revision": tree.revision, "forgotten": forgotten, "items": items, "history": history})


def _parse(data: bytes) -> State:
    fields = orjson.loads(data)
    history = [
        Changes(tuple(_change(change) for change in changes), revision) for revision, _, changes in fields["history"]
    ]
    tree = Tree(fields["revision"], forgotten=fields["forgotten"])
    tree.items = {item.key: item for item in map(_item, fields["items"])}
    tree.history.extend(history)
    return State(tree, {revision: writer for revision, writer, _ in fields["history"]})


def _fields(item: Item) -> list[Any]:
    return [item.key, item.value.decode(), item.revision, item.create_revision, item.lease_id]


def _item(fields: list[Any]) -> Item:
    key, value, revision, create_revision, lease_id = fields
    return Item(key, value.encode(), revision, create_revision, lease_id)


def _change_fields(change: Change) -> list[Any]:
    return [change.key, change.revision, None if change.item is None else _fields(change.item)]


def _change(fields: list[Any]) -> Change:
    key, revision, item = fields
    return Change(key, None if item is None else _item(item), revision)
