"""The first failure wins and names its task; nothing outlives the supervisor."""

import asyncio

import pytest

from headway.errors import NotFound
from headway.runtime.supervisor import Supervisor, TaskFailed


async def fail(error: Exception) -> None:
    raise error


async def test_a_bug_is_raised_with_the_name_of_its_task() -> None:
    async with Supervisor() as supervisor:
        supervisor.start("commit loop", fail(KeyError("x")))
        supervisor.start("fetch loop", asyncio.Event().wait())
        with pytest.raises(TaskFailed, match="commit loop: KeyError"):
            await supervisor.wait()


async def test_an_error_on_purpose_keeps_its_kind() -> None:
    async with Supervisor() as supervisor:
        supervisor.start("resolve", fail(NotFound("no such name")))
        with pytest.raises(NotFound, match="resolve: no such name"):
            await supervisor.wait()


async def test_leaving_cancels_what_still_runs() -> None:
    async with Supervisor() as supervisor:
        task = supervisor.start("forever", asyncio.Event().wait())
    assert task.cancelled()


async def test_stop_ends_the_wait() -> None:
    async with Supervisor() as supervisor:
        asyncio.get_running_loop().call_soon(supervisor.stop)
        await supervisor.wait()


async def test_an_unseen_failure_is_not_an_unretrieved_exception() -> None:
    async with Supervisor() as supervisor:
        supervisor.start("commit loop", fail(KeyError("x")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
