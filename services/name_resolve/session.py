"""The service's side of a session: calls come many to a message, run side by side, and are answered as they are ready.

    message -> calls, a task each -> answers that are ready -> [one message with all of them]

Guarantee: every call that was read is answered once, unless the caller hangs up. When the block is left none runs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headway.errors import HeadwayError, InvalidInput
from headway.v1 import name_resolve_pb2 as pb

log = logging.getLogger(__name__)

MAX_RUNNING = 1024
"""Calls under way; a caller that sends more waits."""
Handler = Callable[[Any, Any], Awaitable[Any]]


class Calls:
    """The calls of one session."""

    def __init__(self, handlers: Mapping[str, Handler], context: Any) -> None:
        """
        Args:
            handlers: What answers each kind of call, by the names of `SessionCall`'s `request`.
            context: Of the session, given to the handlers.
        """
        self._handlers = handlers
        self._context = context
        self._running: set[asyncio.Task[None]] = set()
        self._answers: list[pb.SessionAnswer] = []
        self._changed = asyncio.Event()
        self._is_over = False
        self._is_closing = False

    @asynccontextmanager
    async def taken_from(self, requests: AsyncIterator[pb.SessionRequest]) -> AsyncIterator[None]:
        """Take the caller's requests while the block runs."""
        taking = asyncio.create_task(self._take(requests), name="take the calls of a session")
        try:
            yield
        finally:
            tasks = [taking, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Let `next_answers` return nothing, so that the session ends."""
        self._is_closing = True
        self._changed.set()

    async def next_answers(self) -> list[pb.SessionAnswer]:
        """Waits for: an answer; unblocked by: a call that is done. Nothing: the session is over."""
        while not self._answers:
            if self._is_closing or (self._is_over and not self._running):
                return []
            self._changed.clear()
            await self._changed.wait()
        answers, self._answers = self._answers, []
        return answers

    async def _take(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Start every call that comes.

        consumes: the caller's requests   waits for: the next one; or, with too many under way, for one to be done
        produces: calls under way         waits for: nothing
        """
        async for request in requests:
            for call in request.calls:
                task = asyncio.create_task(self._answer(call), name="call of a session")
                self._running.add(task)
                task.add_done_callback(self._on_done)
            while len(self._running) > MAX_RUNNING:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        self._is_over = True
        self._changed.set()

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._changed.set()

    async def _answer(self, call: pb.SessionCall) -> None:
        kind = call.WhichOneof("request") or ""
        answer = pb.SessionAnswer(id=call.id)
        try:
            if kind not in self._handlers:
                raise InvalidInput("the call is of no kind that this replica knows")
            getattr(answer, kind).CopyFrom(await self._handlers[kind](getattr(call, kind), self._context))
        except Exception as error:  # noqa: BLE001 - the RPC boundary
            answer.error.CopyFrom(_error(error))
        self._answers.append(answer)


def _error(error: Exception) -> pb.SessionError:
    if isinstance(error, HeadwayError):
        return pb.SessionError(code=error.grpc_code, message=str(error))
    log.exception("a call of a session failed", exc_info=error)
    return pb.SessionError(code="INTERNAL", message=f"{type(error).__name__}: {error}")
