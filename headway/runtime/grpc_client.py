"""Calls to other services: channels that reconnect, and statuses that become the errors they stand for."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from headway.errors import BY_CODE, HeadwayError
from headway.runtime.grpc_server import MAX_MESSAGE_BYTES

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]


def connect(address: str) -> grpc.aio.Channel:
    """Open a channel to "host:port"; it reconnects by itself, and is closed with `await channel.close()`."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Turn a failed call into the HeadwayError of its status, prefixed with what was being done.

    Example:
        with translating("fetch the batch of step 3"):
            reply = await stub.FetchBatch(request, timeout=60)
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _error_of(what, error) from error


def _error_of(what: str, error: grpc.aio.AioRpcError) -> HeadwayError:
    kind = BY_CODE.get(error.code().name)
    if kind is None:
        return HeadwayError(f"{what}: {error.code().name}: {error.details()}")
    return kind(f"{what}: {error.details()}")
