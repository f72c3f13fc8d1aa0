"""Errors raised on purpose travel as their status with their message; bugs as INTERNAL; both servers end cleanly."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headway.errors import InvalidInput, Overloaded
from headway.runtime.grpc_client import connect, translating
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.http_server import _bind, serve_http
from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc


class FaultyReward(rpc.RewardServicer):
    async def ListFunctions(self, request: pb.ListFunctionsRequest, context: Any) -> pb.ListFunctionsReply:
        raise Overloaded("the queue of 4 items is full")

    async def Score(self, request: pb.ScoreRequest, context: Any) -> AsyncIterator[pb.ScoreReply]:
        yield pb.ScoreReply(results=[pb.ScoreResult(item_id="a")])
        raise ZeroDivisionError("a bug")


async def test_errors_travel_as_their_status() -> None:
    def add(server: grpc.aio.Server) -> None:
        rpc.add_RewardServicer_to_server(FaultyReward(), server)

    async with serve_grpc("127.0.0.1", 0, add, ["headway.v1.Reward"]) as server:
        channel = connect(f"127.0.0.1:{server.port}")
        stub = rpc.RewardStub(channel)
        with pytest.raises(Overloaded, match="list: the queue of 4 items is full"), translating("list"):
            await stub.ListFunctions(pb.ListFunctionsRequest(), timeout=5)
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for reply in stub.Score(pb.ScoreRequest(), timeout=5):
                received += [result.item_id for result in reply.results]
        assert received == ["a"]
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        await channel.close()


async def test_health_tells_whether_calls_are_welcome() -> None:
    async with serve_grpc("127.0.0.1", 0, lambda server: None, ["headway.v1.Reward"]) as server:
        channel = connect(f"127.0.0.1:{server.port}")
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="headway.v1.Reward")
        assert (await health.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        assert (await health.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await channel.close()


async def test_a_port_in_use_is_named() -> None:
    async with serve_grpc("127.0.0.1", 0, lambda server: None, []) as server:
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{server.port}"):
            async with serve_grpc("127.0.0.1", server.port, lambda server: None, []):
                pass
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{server.port}"):
            async with serve_http(Starlette(), "127.0.0.1", server.port):
                pass


async def test_http_serves_inside_the_loop() -> None:
    async def hello(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/", hello)])
    async with serve_http(app, "127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/") as reply:
            assert await reply.text() == "hello"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://127.0.0.1:{port}/")


async def test_answers_do_not_wait_for_the_caller_to_acknowledge_their_head() -> None:
    with _bind("127.0.0.1", 0) as listener:
        server = await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener)
        accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        async with server:
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await accepted
            assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for stream in (client, writer):
                stream.close()
                await stream.wait_closed()
