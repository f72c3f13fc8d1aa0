"""Many calls over one stream: half the time of a gRPC call each, and what is asked together travels together.

    call -> waiting to be sent -> [one message with all that wait] -> answers, in any order -> each caller

A session looks like the stub it stands for: a call that fails, or whose stream breaks, raises grpc.aio.AioRpcError.
"""

from __future__ import annotations

import asyncio
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import grpc

from headway.v1 import name_resolve_pb2 as pb

if TYPE_CHECKING:  # in the type stubs only
    from headway.v1.name_resolve_pb2_grpc import NameResolveAsyncStub

MAX_CALLS_TOGETHER = 256


class Session:
    """Calls to one replica. The stream is opened by the first call, and again by the first one after it broke."""

    def __init__(self, stub: NameResolveAsyncStub) -> None:
        self._stub = stub
        self._next_id = 0
        self._to_send: list[pb.SessionCall] = []
        self._has_calls = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _call(self, kind: str, request: Any, timeout: float) -> Any:
        """Make a call.

        Raises:
            grpc.aio.AioRpcError: It failed, the stream broke, or there was no answer in time.
        """
        call_id, self._next_id = self._next_id, self._next_id + 1
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answered
        self._to_send.append(pb.SessionCall(id=call_id, **{kind: request}))
        self._has_calls.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="name-resolve session")
        try:
            async with asyncio.timeout(timeout):
                return await answered
        except TimeoutError:
            raise _error("DEADLINE_EXCEEDED", f"no answer in {timeout:.1f} s") from None
        finally:
            self._waiting.pop(call_id, None)

    Register = partialmethod(_call, "register")
    Deregister = partialmethod(_call, "deregister")
    Resolve = partialmethod(_call, "resolve")
    PublishVersion = partialmethod(_call, "publish_version")
    GetVersion = partialmethod(_call, "get_version")
    ListVersions = partialmethod(_call, "list_versions")

    async def _run(self) -> None:
        """One stream, until it breaks; the calls that wait for it then fail."""
        stream: Any = self._stub.Session()
        sending = asyncio.create_task(self._send(stream), name="name-resolve session, sending")
        failure = _error("UNAVAILABLE", "the session ended")
        try:
            async for reply in stream:
                for answer in reply.answers:
                    self._on_answer(answer)
        except grpc.aio.AioRpcError as error:
            failure = error
        finally:
            sending.cancel()
            stream.cancel()
            await asyncio.wait({sending})
            self._fail_all(failure)

    async def _send(self, stream: Any) -> None:
        """Waits for: calls to send; unblocked by: `_call`."""
        while True:
            await self._has_calls.wait()
            calls, self._to_send = self._to_send[:MAX_CALLS_TOGETHER], self._to_send[MAX_CALLS_TOGETHER:]
            if not self._to_send:
                self._has_calls.clear()
            await stream.write(pb.SessionRequest(calls=calls))

    def _on_answer(self, answer: pb.SessionAnswer) -> None:
        waiting = self._waiting.get(answer.id)
        if waiting is None or waiting.done():
            return
        kind = answer.WhichOneof("answer")
        if kind == "error":
            waiting.set_exception(_error(answer.error.code, answer.error.message))
        elif kind is not None:
            waiting.set_result(getattr(answer, kind))

    def _fail_all(self, failure: grpc.aio.AioRpcError) -> None:
        """What was sent may have taken effect; what was not has not, and its callers make it again either way."""
        self._to_send.clear()
        self._has_calls.clear()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(failure)


def _error(code: str, message: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode[code], nothing, nothing, message)
