"""A gRPC server as every service has it: health, reflection, deadlines, and errors that travel as their status."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headway.errors import HeadwayError, InvalidInput
from headway.runtime.grpc_calls import CALLS
from headway.runtime.tracing import served_span

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Payloads that may be larger are streamed."""
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]
if TYPE_CHECKING:  # subscriptable in the type stubs only
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class GrpcServer:
    """A running server: its port, and whether it says that it serves."""

    def __init__(self, port: int, health_servicer: health.aio.HealthServicer, services: Sequence[str]) -> None:
        self.port = port
        self._health = health_servicer
        self._services = ["", *services]

    async def set_serving(self, is_serving: bool) -> None:
        """Tell health probes whether calls are welcome."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)


class ErrorMapping(grpc.aio.ServerInterceptor):
    """Send a HeadwayError as its status with its message; log anything else and send INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.response_streaming:
            return _wrapped_stream(handler, details.method)
        return _wrapped_unary(handler, details.method)


def _wrapped_unary(handler: Handler, method: str) -> Handler:
    behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def call(request: Any, context: Context) -> Any:
        try:
            with CALLS.counted(method), served_span(method, context.invocation_metadata):
                return await cast(Callable[..., Awaitable[Any]], behaviour)(request, context)
        except Exception as error:  # noqa: BLE001 - the RPC boundary
            return await _abort(context, method, error)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(cast(Any, call), handler.request_deserializer, handler.response_serializer)


def _wrapped_stream(handler: Handler, method: str) -> Handler:
    behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream

    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            with CALLS.counted(method), served_span(method, context.invocation_metadata):
                async for reply in cast(Callable[..., AsyncIterator[Any]], behaviour)(request, context):
                    yield reply
        except Exception as error:  # noqa: BLE001 - the RPC boundary
            await _abort(context, method, error)

    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    return make(cast(Any, call), handler.request_deserializer, handler.response_serializer)


async def _abort(context: Context, method: str, error: Exception) -> None:
    if isinstance(error, HeadwayError):
        await context.abort(grpc.StatusCode[error.grpc_code], str(error))
    if isinstance(error, grpc.aio.AbortError):
        raise error
    log.exception("%s failed", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def serve_health(host: str, port: int, is_serving: bool = True) -> AbstractAsyncContextManager[GrpcServer]:
    """Answer health probes, and nothing else: for processes that are asked nothing over gRPC."""
    return serve_grpc(host, port, lambda server: None, [], is_serving=is_serving)


@asynccontextmanager
async def serve_grpc(
    host: str,
    port: int,
    add: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    grace_s: float = 2.0,
    is_serving: bool = True,
) -> AsyncIterator[GrpcServer]:
    """Serve until the block is left; running calls then get `grace_s` seconds to end.

    Args:
        host: Address to bind.
        port: Port to bind; 0 takes any free one.
        add: Adds the servicers, e.g. `lambda server: add_RewardServicer_to_server(api, server)`.
        services: Full names, e.g. "headway.v1.Reward", for health and reflection.
        is_serving: What health probes hear at first.

    Raises:
        InvalidInput: The port is in use.
    """
    server = grpc.aio.server(interceptors=[ErrorMapping()], options=OPTIONS)
    add(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise InvalidInput(f"cannot serve gRPC on {host}:{port}: is the port in use? (0 takes any free one)") from error
    running = GrpcServer(bound, health_servicer, services)
    await running.set_serving(is_serving)
    await server.start()
    try:
        yield running
    finally:
        await running.set_serving(False)
        await server.stop(grace_s)
