"""One engine server as the fleet sees it: pieces go in, each ends on its own, none is ever left without an end.

Pieces that are sent in one tick of the event loop travel as one call, and stream back by their index. That is what
makes hundreds of short samples a second cheap, and lets the engine share the prompt of a group.

    generate(piece) --same tick--> one call --events--> piece.apply       waits for: the piece's last event
                                                                          unblocked by: it, a broken stream, `lose`
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import orjson

from headway.core.evidence import Contradiction
from headway.runtime.tracing import Attributes, current_span, span
from services.rollout_controller.engine_api import Dialect, RequestRefused, ServerBusy, ServerFailed, ServerGone
from services.rollout_controller.engine_http import EngineHttp, failure
from services.rollout_controller.piece import Piece

PAUSE_AGAIN_S = 0.1
MAX_BATCH = 256
"""Pieces of one call."""


class EngineServer:
    """Sends pieces to one server and feeds them with what comes back."""

    def __init__(self, key: str, name: str, engine: str, http: EngineHttp, dialect: Dialect) -> None:
        self.key = key
        """Unique for ever: a server that comes back under its name has another."""
        self.name = name
        """Name and address, for people."""
        self.engine = engine
        self.http = http
        self.dialect = dialect
        self.label = ""
        """The version that it was verified to serve."""
        self.knows_stop_strings = True
        self.num_events = 0
        """Grows while the server talks: a sign of life."""
        self.num_pauses = 0
        self._queue: list[Piece] = []
        self._open: dict[str, Piece] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Pieces that have not ended."""
        return len(self._open)

    async def generate(self, piece: Piece) -> None:
        """Run a piece to its end, or abandon it at the server when cancelled.

        Raises:
            RequestRefused, ServerBusy, ServerFailed: By kind; the piece keeps what had arrived.
            Contradiction: An event could not be believed.
        """
        piece.span = current_span()
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queue.append(piece)
        self._open[piece.rid] = piece
        try:
            await piece.ended
        except asyncio.CancelledError:
            if not self._is_closed:
                self._start(self._abandon(piece.rid))
            raise
        finally:
            self._open.pop(piece.rid, None)
            if not self._open:
                self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until no piece is open, but no longer than this."""
        if self._open and timeout_s > 0:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()

    async def pause(self) -> None:
        """Hold what runs, or end it where the dialect cannot hold it."""
        self.num_pauses += 1
        await self.dialect.pause()
        while self.dialect.ends_requests and self._open:
            await self.wait_until_idle(PAUSE_AGAIN_S)
            if self._open:  # a request that was on its way when the others were ended
                self.num_pauses += 1
                await self.dialect.pause()

    def lose(self, reason: str) -> None:
        """End every open piece: the server is gone, silent, or taken out. They go on elsewhere."""
        for piece in list(self._open.values()):
            piece.fail(ServerFailed(reason))
            self._start(self._abandon(piece.rid))

    async def close(self) -> None:
        """End all calls."""
        self._is_closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _flush(self) -> None:
        pieces, self._queue = self._queue, []
        pieces = [piece for piece in pieces if not piece.ended.done()]
        size = MAX_BATCH if self.dialect.takes_batches else 1
        for start in range(0, len(pieces), size):
            self._start(self._call(pieces[start : start + size]))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, pieces: Sequence[Piece]) -> None:
        """One call; whatever happens, each of its pieces has ended afterwards."""
        error: Exception = ServerGone(f"{self.name}: the stream ended before the request did")
        try:
            await self._stream(pieces)
        except RequestRefused as refusal:
            if len(pieces) > 1:
                for piece in pieces:
                    self._start(self._call([piece]))
                return
            error = refusal
        except (ServerFailed, ServerBusy) as lost:
            error = lost
        except asyncio.CancelledError:
            error = ServerFailed(f"{self.name}: taken out")
            raise
        except Exception as bug:  # noqa: BLE001  # a task's boundary: the bug is raised where the piece is awaited
            error = bug
        for piece in pieces:
            piece.fail(error)

    async def _stream(self, pieces: Sequence[Piece]) -> None:
        path, body = self.dialect.generate_call(pieces)
        about: Attributes = {
            "server.address": self.http.url,
            "headway.version": self.label,
            "headway.pieces": len(pieces),
        }
        first, *others = (piece.span for piece in pieces)
        with span(f"POST {path}", about, calls_out=True, parent=first, links=others):
            async with aclosing(self.http.stream(path, body)) as events:
                async for payload in events:
                    self.num_events += 1
                    self._apply(payload, pieces)

    def _apply(self, payload: bytes, pieces: Sequence[Piece]) -> None:
        """Feed one event to its piece; one that cannot be believed ends that piece, or all when it names none.

        Raises:
            RequestRefused, ServerBusy, ServerFailed: The event says that the call failed.
        """
        event = _parsed(payload)
        index = event.get("index", 0) if isinstance(event, dict) else 0
        try:
            update = self.dialect.read(event, pieces)
            if update.error is not None:
                raise failure(update.error[0], f"{self.name}: {update.error[1]}")
            pieces[update.index].apply(update)
        except Contradiction as contradiction:
            pieces[index].fail(contradiction)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            for piece in pieces:
                piece.fail(Contradiction(f"unreadable event: {type(error).__name__}: {error}"))

    async def _abandon(self, rid: str) -> None:
        """Tell the server to stop a request that nobody waits for; one that does not answer has lost it anyway."""
        try:
            await self.dialect.abort(rid)
        except ServerFailed:
            return


def _parsed(payload: bytes) -> Any:
    """An event's JSON; the literals NaN and Infinity, which are no JSON, are read so that the check can name them."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        try:
            return json.loads(payload)
        except ValueError:
            return None
