"""Supervise a process's background tasks: the first failure wins, ends the process, and names the task.

Guarantee: when the `async with` block is left, no task started here is running any more.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from headway.errors import HeadwayError


class TaskFailed(Exception):
    """A supervised task raised something that is a bug; the cause is chained."""


class Supervisor:
    """Owns tasks by name.

    Example:
        async with Supervisor() as supervisor:
            supervisor.start("watch versions", watch_versions())
            await supervisor.wait()
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._ended = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.ended.done() and not self.ended.cancelled():
            self.ended.exception()  # seen: wait() may never have been called

    @property
    def ended(self) -> "asyncio.Future[None]":
        if self._ended is None:
            raise RuntimeError("a Supervisor is used with `async with`")
        return self._ended

    def start(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine until it ends, fails, or the supervisor is left."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def stop(self) -> None:
        """Let `wait` return: the service has done what it is for."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def wait(self) -> None:
        """Wait until `stop` is called, or raise the first failure.

        Raises:
            HeadwayError: A task ended with an error raised on purpose; its message is prefixed with the task's name.
            TaskFailed: A task ended with a bug.
        """
        await asyncio.shield(self.ended)

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.ended.done():
            self.ended.set_exception(_named(task.get_name(), error))


def _named(task: str, error: BaseException) -> Exception:
    if isinstance(error, HeadwayError):
        named: Exception = type(error)(f"{task}: {error}")
    else:
        named = TaskFailed(f"{task}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
