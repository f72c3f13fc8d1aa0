"""A service that is done ends its process, or stays until it is asked to stop where HEADWAY_WHEN_DONE says so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headway.runtime import service
from headway.runtime.service import Running, _serve_until
from headway.runtime.supervisor import Supervisor


@asynccontextmanager
async def service_that_is_done() -> AsyncIterator[Running]:
    async with Supervisor() as supervisor:
        supervisor.stop()
        yield Running(supervisor)


def serving(stopped: "asyncio.Future[None]") -> asyncio.Task[None]:
    return asyncio.create_task(_serve_until(stopped, asyncio.Event(), "trainer", service_that_is_done(), "0"))


async def test_a_service_that_is_done_ends() -> None:
    await serving(asyncio.get_running_loop().create_future())


async def test_where_it_is_to_stay_it_ends_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_WHEN_DONE", "stay")
    stays = asyncio.Event()
    monkeypatch.setattr(service.log, "info", lambda message, *_: stays.set() if "stays" in message else None)
    stopped = asyncio.get_running_loop().create_future()
    task = serving(stopped)
    await asyncio.wait_for(stays.wait(), 10)
    assert not task.done()
    stopped.set_result(None)
    await task
