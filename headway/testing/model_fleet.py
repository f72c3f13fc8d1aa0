"""A model of inference servers in an event loop's own time: versions, interruptions, losses; no sockets, no weights.

`ModelFleet` is both what the rollout controller must know of the servers and the engine of its workflows. A server
generates `tokens_per_s` for each request. When it takes a new version, its requests go on with it; when it is lost,
they go on elsewhere with the tokens that they have. Each token id tells which version made it (`token_of`), so that a
test can check the stamps.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.core.trajectory import StopReason, Trajectory
from headway.workflow.api import InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from headway.workflow.sequence import TokenSequence

TOKENS_A_VERSION = 16


def token_of(version: int, index: int) -> int:
    """The id of the `index`-th token of a sample, made by `version`."""
    return version * TOKENS_A_VERSION + index % TOKENS_A_VERSION


def version_of(token: int) -> int:
    """Which version made a token."""
    return token // TOKENS_A_VERSION


@dataclass(eq=False)
class ModelServer:
    """One server."""

    name: str
    version: int | None = None
    """The step that it serves; None: nothing yet."""
    is_up: bool = True
    running: dict["asyncio.Future[bool]", None] = field(default_factory=dict)
    """One per request, oldest first; its result says whether the piece came to its end."""

    @property
    def is_ready(self) -> bool:
        return self.is_up and self.version is not None

    def interrupt(self) -> None:
        """Every request stops here and asks anew."""
        for piece in list(self.running):
            if not piece.done():
                piece.set_result(False)


class ModelFleet:
    """Some servers behind one engine.

    Args:
        num_servers: How many there are.
        tokens_per_s: How fast each request is served.
        length_of: Tokens of the sample that a request makes; asked once for each request.
        load_s: How long a server takes to load a version.
    """

    def __init__(
        self,
        num_servers: int,
        tokens_per_s: float,
        length_of: Callable[[ModelRequest], int],
        load_s: float = 0.1,
    ) -> None:
        self.servers = [ModelServer(f"server-{number}") for number in range(num_servers)]
        self.published = -1
        self._tokens_per_s = tokens_per_s
        self._length_of = length_of
        self._load_s = load_s
        self._loop = asyncio.get_running_loop()
        self._changed = self._loop.create_future()
        self._next = 0

    # ---- what the controller asks

    @property
    def served_step(self) -> int | None:
        return min(
            (server.version for server in self.servers if server.is_up and server.version is not None), default=None
        )

    async def wait_for_step(self, step: int) -> None:
        while (served := self.served_step) is None or served < step:
            await asyncio.shield(self._changed)

    # ---- what happens to it

    def publish(self, step: int) -> None:
        """A version is complete: every server that is up takes it after `load_s`."""
        self.published = max(self.published, step)
        for server in self.servers:
            if server.is_up:
                self._loop.call_later(self._load_s, self._take, server, step)

    def lose(self, server: ModelServer) -> None:
        server.is_up = False
        server.version = None
        server.interrupt()
        self._wake()

    def bring_back(self, server: ModelServer) -> None:
        """It loads the published version before it serves."""
        server.is_up = True
        self._loop.call_later(self._load_s, self._take, server, self.published)

    def _take(self, server: ModelServer, step: int) -> None:
        if server.is_up and step >= 0 and (server.version is None or server.version < step):
            server.version = max(step, self.published) if server.version is None else step
            server.interrupt()
            self._wake()

    def _wake(self) -> None:
        self._changed.set_result(None)
        self._changed = self._loop.create_future()

    # ---- the engine

    def get_version(self) -> int:
        return self.served_step or 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate until the length is reached, over interruptions."""
        response = ModelResponse(list(req.input_ids), stop_reason=StopReason.STOP, num_pieces=0)
        length = self._length_of(req)
        while len(response.output_tokens) < length:
            server = await self._acquire()
            response.num_pieces += 1
            await self._piece(server, response, length)
        return response

    async def _acquire(self) -> ModelServer:
        while True:
            ready = [server for server in self.servers if server.is_ready]
            if ready:
                self._next += 1
                return ready[self._next % len(ready)]
            await asyncio.shield(self._changed)

    async def _piece(self, server: ModelServer, response: ModelResponse, length: int) -> None:
        assert server.version is not None
        version, began, made = server.version, self._loop.time(), len(response.output_tokens)
        piece: asyncio.Future[bool] = self._loop.create_future()
        timer = self._loop.call_later((length - made) / self._tokens_per_s, _finish, piece)
        server.running[piece] = None
        try:
            is_done = await piece
        finally:
            timer.cancel()
            del server.running[piece]
        count = length - made if is_done else min(length - made, int((self._loop.time() - began) * self._tokens_per_s))
        response.output_tokens += [token_of(version, made + index) for index in range(count)]
        response.output_logprobs += [-1.0] * count
        response.output_versions += [version] * count


def _finish(piece: "asyncio.Future[bool]") -> None:
    if not piece.done():
        piece.set_result(True)


class ModelWorkflow(RolloutWorkflow):
    """One prompt token, one generation, a reward that `score` makes of the row; the row may name a fault.

    Args:
        score: Awaited for the reward of a row; may raise what a reward client raises.
    """

    def __init__(self, score: Callable[[dict[str, Any]], Any]) -> None:
        self._score = score
        self.running: Counter[str] = Counter()
        """Samples that run now, by the row's `row`."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        row = str(data["row"])
        self.running[row] += 1
        try:
            return await self._episode(engine, data)
        finally:
            self.running[row] -= 1
            if not self.running[row]:
                del self.running[row]

    async def _episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        if data.get("is_poison"):
            raise ValueError("a poison prompt")
        response = await engine.agenerate(ModelRequest(input_ids=[0], metadata=data))
        reward = await self._score(data)
        if reward is None:
            return None
        sequence = TokenSequence()
        sequence.add_prompt([0])
        sequence.add_response(response)
        return sequence.trajectory(reward)
