"""A session answers each of many calls with its own answer, and one call's trouble is no other's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest

from headway.runtime.grpc_client import connect
from headway.runtime.names_session import Session
from headway.runtime.service import Placement
from headway.v1 import name_resolve_pb2 as pb
from headway.v1.name_resolve_pb2_grpc import NameResolveStub
from services.name_resolve.app import serve
from services.name_resolve.memory import MemoryStore

TIMEOUT_S = 20.0
WAIT_FOR_EVER = pb.ResolveRequest(prefix="nobody", min_entries=1, wait_s=600)


class Server:
    """A service that can be stopped and started on its port."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self.port = 0

    async def start(self) -> None:
        running = await self._stack.enter_async_context(serve(MemoryStore(), Placement(grpc_port=self.port)))
        self.port = running.ports["grpc"]

    async def stop(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def session(server: Server) -> AsyncIterator[Session]:
    channel = connect(f"127.0.0.1:{server.port}")
    session = Session(NameResolveStub(channel))
    yield session
    await session.close()
    await channel.close()


def register(index: int) -> pb.RegisterRequest:
    return pb.RegisterRequest(name=f"n/{index}", value=str(index))


async def test_each_call_has_its_own_answer(session: Session) -> None:
    await asyncio.gather(*(session.Register(register(index), timeout=TIMEOUT_S) for index in range(600)))
    calls = [session.Resolve(pb.ResolveRequest(name=f"n/{index}"), timeout=TIMEOUT_S) for index in range(700)]
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert [reply.entries[0].value for reply in replies[:600]] == [str(index) for index in range(600)]
    assert {error.code() for error in replies[600:]} == {grpc.StatusCode.NOT_FOUND}


async def test_a_refusal_says_what_a_call_by_itself_would_say(session: Session) -> None:
    await session.Register(register(1), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError, match="n/1 is taken") as refused:
        await session.Register(register(1), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_slow_call_holds_up_no_other_and_ends_at_its_deadline(session: Session) -> None:
    slow = asyncio.create_task(session.Resolve(WAIT_FOR_EVER, timeout=0.3))
    await session.Register(register(1), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await slow
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_that_gives_up_does_not_end_the_session(session: Session) -> None:
    slow = asyncio.create_task(session.Resolve(WAIT_FOR_EVER, timeout=TIMEOUT_S))
    await session.Register(register(1), timeout=TIMEOUT_S)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert (await session.Resolve(pb.ResolveRequest(name="n/1"), timeout=TIMEOUT_S)).entries[0].value == "1"


async def test_calls_under_way_fail_when_the_server_ends_and_later_ones_reach_the_next(
    session: Session, server: Server
) -> None:
    slow = asyncio.create_task(session.Resolve(WAIT_FOR_EVER, timeout=TIMEOUT_S))
    await session.Register(register(1), timeout=TIMEOUT_S)
    await server.stop()
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        await slow
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.start()
    await registered(session)


async def registered(session: Session) -> None:
    """Call again, as every caller does, while the end of the last stream is still on its way."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await session.Register(register(1), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.01)
            else:
                return


async def test_a_call_of_no_known_kind_is_refused_alone(server: Server) -> None:
    async with connect(f"127.0.0.1:{server.port}") as channel:
        stream = NameResolveStub(channel).Session()
        await stream.write(pb.SessionRequest(calls=[pb.SessionCall(id=7)]))
        reply = await stream.read()
        assert [(answer.id, answer.error.code) for answer in reply.answers] == [(7, "INVALID_ARGUMENT")]
        await stream.write(pb.SessionRequest(calls=[pb.SessionCall(id=8, register=register(1))]))
        await stream.done_writing()
        assert (await stream.read()).answers[0].id == 8
        assert await stream.read() is grpc.aio.EOF
