"""AReaL's `name_resolve` for people's scripts: blocking calls, the same names, arguments and errors, on any store.

    from headway.runtime import names_areal as name_resolve
    name_resolve.add("exp/trial/worker/0", "10.0.0.7:4711", keepalive_ttl=10)
    name_resolve.get_subtree("exp/trial/worker")

The functions of the module are the methods of one repository, at the address in HEADWAY_NAME_RESOLVE.

A name root ends at a slash: `trial1` is not `trial10`. Values and names come in the order of the names, from any store.
A name with `keepalive_ttl` is kept, by a thread, for as long as this process lives, and lapses when it dies. Of many
that `add` one name without `replace`, one succeeds.
"""

import asyncio
import atexit
import functools
import logging
import os
import posixpath
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from headway.errors import AlreadyExists, NotFound, TimedOut
from headway.runtime.names import NameClient, Put, Registration, Removed, Snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")
CALL_S = 60.0
SURFACE = {"add", "add_subentry", "clear_subtree", "delete", "find_subtree", "get", "get_subtree", "reset", "wait"}
SURFACE |= {"watch_names"}


class NameEntryExistsError(AlreadyExists):
    """`add` without `replace` of a name that is there."""


class NameEntryNotFoundError(NotFound):
    """`get` or `delete` of a name that is not there."""


class NameWaitTimeoutError(TimedOut, TimeoutError):
    """`wait` came to its end."""


class NameRecordRepository:
    """Names at one name-resolve service, from any thread."""

    def __init__(self, addresses: str = "") -> None:
        """
        Args:
            addresses: "host:port[,host:port]"; empty: what HEADWAY_NAME_RESOLVE says.
        """
        self._client = NameClient(addresses or os.environ.get("HEADWAY_NAME_RESOLVE", ""))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="name-resolve", daemon=True)
        self._thread.start()
        self._kept: dict[str, Registration] = {}
        self._to_delete: set[str] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._run(self._client.__aenter__())
        atexit.register(self.close)

    def close(self) -> None:
        """Delete what was added with `delete_on_exit`, and hang up."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self.reset()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    def add(
        self,
        name: str,
        value: Any,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
    ) -> None:
        """Add a name.

        Args:
            name: "a/b/c".
            value: Stored as text.
            delete_on_exit: Delete it with `reset`, or when this process ends in good order.
            keepalive_ttl: Keep it while this process lives; it lapses so many seconds after that.
            replace: Take it over if it is there.

        Raises:
            NameEntryExistsError: It is there, and `replace` is false.
        """
        self._run(self._add(_clean(name), str(value), delete_on_exit, keepalive_ttl or 0.0, replace))

    async def _add(self, name: str, value: str, delete_on_exit: bool, ttl_s: float, replace: bool) -> None:
        try:
            registration = await self._client.register(name, value, ttl_s=ttl_s, replace=replace)
        except AlreadyExists as error:
            raise NameEntryExistsError(str(error)) from error
        former = self._kept.pop(name, None)
        if former is not None:
            await former.close()  # its lease; the name itself is the new one's by now
        self._to_delete.discard(name)
        if ttl_s:
            self._kept[name] = registration
        if delete_on_exit:
            self._to_delete.add(name)

    def add_subentry(self, name: str, value: Any, **kwargs: Any) -> str:
        """Add a value below a name root, under a name of its own; that name. Takes what `add` takes."""
        sub_name = f"{_clean(name)}/{uuid.uuid4().hex[:8]}"
        self.add(sub_name, value, **kwargs)
        return sub_name

    def delete(self, name: str) -> None:
        """Delete a name.

        Raises:
            NameEntryNotFoundError: It is not there.
        """
        self._run(self._delete(_clean(name)))

    async def _delete(self, name: str) -> None:
        try:
            await self._client.deregister(name)
        except NotFound as error:
            raise NameEntryNotFoundError(str(error)) from error
        finally:
            await self._forget([name])

    def clear_subtree(self, name_root: str) -> None:
        """Delete a name root and everything below it."""
        self._run(self._clear(_clean(name_root)))

    async def _clear(self, root: str) -> None:
        await self._client.clear(root)
        await self._forget([name for name in {*self._kept, *self._to_delete} if _is_below(name, root)])

    async def _forget(self, names: Sequence[str]) -> None:
        """Stop keeping names."""
        for name in names:
            self._to_delete.discard(name)
            registration = self._kept.pop(name, None)
            if registration is not None:
                await registration.close()

    def get(self, name: str) -> str:
        """The value of a name.

        Raises:
            NameEntryNotFoundError: It is not there.
        """
        try:
            return self._run(self._client.get(_clean(name))).value
        except NotFound as error:
            raise NameEntryNotFoundError(str(error)) from error

    def get_subtree(self, name_root: str) -> list[str]:
        """The values at and below a name root, in the order of their names."""
        return [entry.value for entry in self._run(self._client.list(_clean(name_root)))]

    def find_subtree(self, name_root: str) -> list[str]:
        """The names at and below a name root, in order."""
        return [entry.name for entry in self._run(self._client.list(_clean(name_root)))]

    def wait(self, name: str, timeout: float | None = None, poll_frequency: float = 1) -> str:
        """Wait for a name; its value. Nothing polls: `poll_frequency` is there for old scripts.

        Raises:
            NameWaitTimeoutError: It did not appear in `timeout` seconds; a TimeoutError.
        """
        name = _clean(name)
        try:
            return self._run(self._appears(name, timeout), None)
        except TimeoutError:
            raise NameWaitTimeoutError(f"{name} did not appear in {timeout} s") from None

    async def _appears(self, name: str, timeout_s: float | None) -> str:
        async with asyncio.timeout(timeout_s), aclosing(self._client.watch(name)) as events:
            async for event in events:
                entries = (
                    event.entries if isinstance(event, Snapshot) else (event.entry,) if isinstance(event, Put) else ()
                )
                for entry in entries:
                    if entry.name == name:
                        return entry.value
        raise AssertionError("a watch does not end")

    def watch_names(
        self,
        names: str | Sequence[str],
        call_back: Callable[[], Any],
        poll_frequency: float = 15,
        wait_timeout: float = 300,
    ) -> None:
        """Call back once, in a thread, when all of the names have been there and are gone. Returns at once.

        Args:
            names: One name or several.
            call_back: Called without arguments.
            poll_frequency: There for old scripts; nothing polls.
            wait_timeout: Longest that is waited for the names to appear, seconds; then the watch ends with a log line.
        """
        wanted = {_clean(name) for name in ([names] if isinstance(names, str) else names)}
        self._loop.call_soon_threadsafe(self._start_watching, wanted, call_back, wait_timeout)

    def _start_watching(self, names: set[str], call_back: Callable[[], Any], wait_timeout: float) -> None:
        task = self._loop.create_task(self._watch(names, call_back, wait_timeout))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, names: set[str], call_back: Callable[[], Any], wait_timeout: float) -> None:
        try:
            await asyncio.gather(*(self._appears(name, wait_timeout) for name in names))
        except TimeoutError:
            log.error("not watched: %s did not all appear in %s s", sorted(names), wait_timeout)
            return
        await asyncio.gather(*(self._disappears(name) for name in names))
        log.info("%s are gone", sorted(names))
        await asyncio.to_thread(call_back)

    async def _disappears(self, name: str) -> None:
        async with aclosing(self._client.watch(name)) as events:
            async for event in events:
                if event == Removed(name):
                    return
                if isinstance(event, Snapshot) and all(entry.name != name for entry in event.entries):
                    return

    def reset(self) -> None:
        """Delete what this repository added with `delete_on_exit`."""
        self._run(self._reset())

    async def _reset(self) -> None:
        for name in sorted(self._to_delete):
            kept = self._kept.get(name)
            try:
                await (kept.close() if kept else self._client.deregister(name))
            except NotFound:
                log.info("%s was gone already", name)
            await self._forget([name])

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = CALL_S) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


@functools.cache
def default_repository() -> NameRecordRepository:
    """The repository behind the functions of this module."""
    return NameRecordRepository()


def __getattr__(name: str) -> Any:
    """`names_areal.add(...)` is `default_repository().add(...)`."""
    if name in SURFACE:
        return getattr(default_repository(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _clean(name: str) -> str:
    return posixpath.normpath(name).strip("/") if name else name


def _is_below(name: str, root: str) -> bool:
    return not root or name == root or name.startswith(f"{root}/")
