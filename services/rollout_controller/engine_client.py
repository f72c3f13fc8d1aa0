"""Generate over whatever happens: interruptions, weight updates, lost servers. What workflows get as their engine.

    request -> piece on a server -> stop, length             done
                  ^      |
                  |      +-- aborted, server lost, busy ---> go on with the tokens so far, on a server whose version
                  +------------------------------------------ is not older than that of the last token

The budget (`max_new_tokens`) shrinks by what the pieces gave; so does `min_new_tokens`. Each piece's evidence is
checked as it comes in. A request ends with an error, by kind: refused (never tried again), a reply that cannot be
believed, more than `retries` pieces in a row that brought nothing, or its time is over.
"""

import asyncio
import time
from typing import Protocol

from headway.core.evidence import Contradiction
from headway.core.routing import Wanted
from headway.core.version import PolicyVersion
from headway.errors import TimedOut
from headway.workflow.api import ModelRequest, ModelResponse
from headway.workflow.errors import EvidenceInvalid, ServerLost
from headway.workflow.group import current_group
from services.rollout_controller.engine_api import ServerBusy, ServerFailed
from services.rollout_controller.engine_server import EngineServer
from services.rollout_controller.generation import Generation, Limits
from services.rollout_controller.piece import Piece

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0


class Servers(Protocol):
    """What a request needs of the fleet."""

    @property
    def limits(self) -> Limits: ...

    request_timeout_s: float
    request_retries: int

    @property
    def served_step(self) -> int | None: ...

    def is_known(self, version: PolicyVersion) -> bool:
        """Whether the version was published."""
        ...

    async def acquire(self, wanted: Wanted) -> EngineServer:
        """Wait for a server that may take the request; `release` must follow."""
        ...

    def release(self, server: EngineServer, wanted: Wanted, failure: Exception | None, has_ended: bool) -> None:
        """The request has left the server; `has_ended` is false when it was withdrawn."""
        ...


class FleetEngine:
    """The engine of workflows: generates with the fleet, pinned to a version or with whatever is newest."""

    def __init__(self, servers: Servers, pinned: PolicyVersion | None = None) -> None:
        self._servers = servers
        self._pinned = pinned

    def get_version(self) -> int:
        return self._pinned.step if self._pinned is not None else self._servers.served_step or 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        began, limit_s = time.monotonic(), self._servers.request_timeout_s
        key = str(req.metadata.get("affinity", "")) or current_group.get()
        generation = Generation(req, self._servers.limits, self._pinned, key)
        try:
            async with asyncio.timeout(limit_s):
                while generation.stop_reason is None:
                    await self._one_piece(generation)
                    await self._pause_after(generation)
        except TimeoutError as error:
            raise TimedOut(
                f"request {req.rid} took longer than rollout.request_timeout, {limit_s:g} s; it has "
                f"{len(generation.ids)} tokens from {generation.num_pieces} pieces"
            ) from error
        return generation.response(time.monotonic() - began)

    async def _one_piece(self, generation: Generation) -> None:
        """Ask one server to go on, and take what it gives."""
        wanted = generation.wanted()
        server = await self._servers.acquire(wanted)
        failure: Exception | None = None
        has_ended, num_pauses = False, server.num_pauses
        try:
            piece = generation.next_piece(server.label, server.knows_stop_strings)
            failure = await self._run(server, piece)
            if failure is not None:
                generation.note_failure(server.name, str(failure))
            generation.was_paused = failure is None and server.num_pauses != num_pauses
            generation.accept(piece, server.name, server.knows_stop_strings, self._servers.is_known)
            has_ended = True
        except Contradiction as contradiction:
            failure, has_ended = contradiction, True
            raise EvidenceInvalid(f"{server.name}: {contradiction}") from contradiction
        finally:
            self._servers.release(server, wanted, failure, has_ended)

    @staticmethod
    async def _run(server: EngineServer, piece: Piece) -> Exception | None:
        """Let the piece run to its end; a failing server leaves what can be kept in it, and is returned."""
        try:
            await server.generate(piece)
        except (ServerFailed, ServerBusy) as failure:
            piece.salvage()
            return failure
        return None

    async def _pause_after(self, generation: Generation) -> None:
        """After a piece that brought nothing, wait a little, or give up."""
        if generation.idle_pieces == 0 or generation.stop_reason is not None:
            return
        if generation.idle_pieces > self._servers.request_retries:
            failures = "; ".join(f"{server}: {why}" for server, why in generation.failures.items())
            raise ServerLost(
                f"{generation.idle_pieces} tries in a row brought no token: {failures or 'aborted each time'}"
            )
        await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (generation.idle_pieces - 1), LONGEST_BACKOFF_S))
