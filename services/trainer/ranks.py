"""Rank 0 says what is done next; the other ranks follow. The event loop never waits for torch.

    rank 0:      await ranks.call("train", batch, step)     -> broadcast the call -> the torch thread -> its result
    rank 1..n:   follow(worker): receive a call, do it, wait for the next

Guarantee: every rank does the same calls in the same order, in one thread. A rank that fails takes the others with it:
its collective breaks, and torchrun ends the rest.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from services.trainer.distributed import group_of_all_ranks
from services.trainer.worker import TorchWorker

CALL_TIMEOUT = timedelta(days=7)
"""How long followers wait for the next call: rank 0 may wait that long for a batch or for leadership."""
END = "end"
log = logging.getLogger(__name__)


class TorchThread:
    """One thread for all torch work. It is a daemon: work that hangs does not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torch", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], Any]) -> Any:
        """Do `work` in the thread; raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def job() -> None:
            try:
                result, error = work(), None
            except BaseException as raised:  # noqa: BLE001 - handed to the awaiting task
                result, error = None, raised
            with suppress(RuntimeError):  # the loop has been closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(_settle, done, result, error)

        self._jobs.put(job)
        return await done

    def close(self, wait_s: float) -> None:
        """Let the work in hand end, for at most `wait_s` seconds."""
        self._jobs.put(None)
        self._thread.join(wait_s)
        if self._thread.is_alive():
            log.warning("the torch thread is still working; the process ends without it")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Ranks:
    """All ranks, as rank 0 speaks to them.

    Args:
        worker: The work of this rank.
    """

    def __init__(self, worker: TorchWorker) -> None:
        self._worker = worker
        self._thread = TorchThread()
        self._group = command_group()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Do `worker.name(*arguments)` on every rank; returns rank 0's result."""

        def work() -> Any:
            if self._group is not None:
                dist.broadcast_object_list([(name, arguments)], src=0, group=self._group)
            return getattr(self._worker, name)(*arguments)

        return await self._thread.run(work)

    async def call_here(self, name: str, *arguments: Any) -> Any:
        """Do something that concerns this rank alone."""
        return await self._thread.run(lambda: getattr(self._worker, name)(*arguments))

    async def close(self, wait_s: float = 8.0) -> None:
        """Send the other ranks home, and let the work in hand end."""
        self._worker.is_stopping.set()
        end = asyncio.ensure_future(self._thread.run(self._end))
        await asyncio.wait({end}, timeout=wait_s)
        end.cancel()
        self._thread.close(wait_s=0.1)

    def _end(self) -> None:
        if self._group is not None:
            dist.broadcast_object_list([(END, ())], src=0, group=self._group)
        self._worker.close()


def rank_of_this_process() -> int:
    """0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def command_group() -> "dist.ProcessGroup | None":
    """The group in which calls travel; None with one rank. Every rank calls it once, in the same order."""
    return group_of_all_ranks(CALL_TIMEOUT)


def follow(worker: TorchWorker) -> None:
    """Do what rank 0 asks for, until it says that this is the end. Blocks."""
    group = command_group()
    while True:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=group)
        name, arguments = received[0]
        if name == END:
            worker.close()
            return
        getattr(worker, name)(*arguments)


def _settle(done: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
