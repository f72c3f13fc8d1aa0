"""Between HTTP and a session: whose call it is, how much is read, what happens when its client goes, and streams.

A call whose client has gone is withdrawn, from the engine too. A stream begins with its answer, or after `PING_S`
without one; until then an error is an HTTP status, which clients can act on, and afterwards an event of the stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from headway.errors import HeadwayError
from headway.gateway.errors import BodyTooLarge

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 << 20
PING_S = 10.0
PING = b": the answer is not complete yet\n\n"
EVENT_STREAM = "text/event-stream"


def key_of(request: Request) -> str:
    """The key of a call, where either client puts it; empty: none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key") or ""


async def body_of(request: Request) -> bytes:
    """The body of a call.

    Raises:
        BodyTooLarge: It is larger than is read.
    """
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(orjson.dumps(content), status, headers, "application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do something for a client, and stop when it goes.

    Raises:
        ClientDisconnect: It has gone.
    """
    async with watched(request, work) as (doing, leaving):
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()


async def stream(
    request: Request,
    work: Coroutine[Any, Any, T],
    frames: Callable[[T], Iterable[bytes]],
    error_frame: Callable[[HeadwayError], bytes],
    headers: Mapping[str, str],
) -> Response:
    """Answer with a stream of events.

    Args:
        frames: The events of what comes out of the work, encoded.
        error_frame: The event of an error that comes after the stream has begun.

    Raises:
        ClientDisconnect: The client has gone before it began.
    """
    events = _events(request, work, frames, error_frame)
    first = await anext(events)

    async def all_events() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    return StreamingResponse(all_events(), headers=dict(headers), media_type=EVENT_STREAM)


async def _events(
    request: Request,
    work: Coroutine[Any, Any, T],
    frames: Callable[[T], Iterable[bytes]],
    error_frame: Callable[[HeadwayError], bytes],
) -> AsyncIterator[bytes]:
    """Comments while the work goes on, and then its events. Raises only before the first of them."""
    has_begun = False
    async with watched(request, work) as (doing, leaving):
        try:
            while not doing.done():
                await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED, timeout=PING_S)
                if leaving.done() and not doing.done():
                    raise ClientDisconnect
                if not doing.done():
                    has_begun = True
                    yield PING
            for frame in frames(doing.result()):
                yield frame
        except HeadwayError as error:
            if not has_begun:
                raise
            yield error_frame(error)


@asynccontextmanager
async def watched(
    request: Request, work: Coroutine[Any, Any, T]
) -> AsyncIterator[tuple["asyncio.Task[T]", "asyncio.Task[None]"]]:
    """The work, and another task that ends when the client goes. Neither is left behind."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        yield doing, leaving
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
        await asyncio.wait({doing, leaving})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
