"""Weights by broadcast: servers that go to a version together receive it together.

    each of them:  pause -> arrive ----+
                                       +-- all here, or too late --> receive | trainer sends --> verify, continue
    the others:    failed, left -------+

A server that does not arrive in time, joins later, or takes another dialect loads from disk. The process group is kept
while its members are the same, and rebuilt when they are not. When no trainer holds the version, all load from disk.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError
from services.rollout_controller.engine_api import Broadcasts, UpdateFailed
from services.rollout_controller.engine_server import EngineServer
from services.rollout_controller.weight_source import Group, WeightSource

ARRIVE_S = 5.0
"""How long servers that are paused already wait for the last one."""
log = logging.getLogger(__name__)


class Circle:
    """The servers that are in a process group with the trainer, in the order of their ranks."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._group_name = ""
        self._members: list[tuple[str, Broadcasts]] = []
        """Key and dialect."""

    async def send(self, version: PolicyVersion, servers: Sequence[EngineServer], timeout_s: float) -> list[bool]:
        """Bring a version to paused servers; says of each whether it has it. The group is given up when one has not.

        Raises:
            HeadwayError: Nothing was sent, nothing was changed.
        """
        members = [(server.key, _broadcasts(server)) for server in servers]
        is_same = [key for key, _ in members] == [key for key, _ in self._members]
        group = await self._source.open(version, len(members) + 1, self._group_name if is_same else "")
        if group.is_new:
            await self._leave()
        self._members, self._group_name = members, group.name
        sending = self._source.send(version, group, timeout_s)
        receiving = [self._receive(dialect, group, rank + 1, version) for rank, (_, dialect) in enumerate(members)]
        _, *received = await asyncio.gather(sending, *receiving, return_exceptions=True)
        for error in received:
            if isinstance(error, BaseException) and not isinstance(error, HeadwayError):
                raise error
        if any(received):
            await self._leave()
        return [error is None for error in received]

    @staticmethod
    async def _receive(dialect: Broadcasts, group: Group, rank: int, version: PolicyVersion) -> None:
        if group.is_new:
            await dialect.join_group(group, rank)
        await dialect.receive(group, version)

    async def _leave(self) -> None:
        """Forget the group, here and at its members."""
        members, self._members = self._members, []
        name, self._group_name = self._group_name, ""
        for _, dialect in members:
            with suppress(HeadwayError):
                await dialect.leave_group(name)


class Broadcast:
    """One version's way to the servers that were open when it was published.

    Args:
        run: Starts the transfer as a supervised task.
    """

    def __init__(
        self,
        version: PolicyVersion,
        servers: Iterable[EngineServer],
        circle: Circle,
        timeout_s: float,
        run: Callable[["Broadcast"], None],
    ) -> None:
        self.version = version
        self._circle = circle
        self._timeout_s = timeout_s
        self._run = run
        self._missing = {server.key for server in servers if isinstance(server.dialect, Broadcasts)}
        self._here: dict[str, tuple[EngineServer, asyncio.Future[bool]]] = {}
        self._complete = asyncio.Event()

    def awaits(self, server: EngineServer) -> bool:
        return server.key in self._missing

    async def arrive(self, server: EngineServer) -> bool:
        """A paused server waits for its weights; False: nothing came, it should load from disk.

        Raises:
            UpdateFailed: It got some of them, or none that it can vouch for.
        """
        self._missing.discard(server.key)
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if not self._here:
            self._run(self)
        self._here[server.key] = server, outcome
        self._look()
        return await outcome

    def drop(self, server: EngineServer) -> None:
        """The server will not come."""
        self._missing.discard(server.key)
        self._look()

    async def transfer(self) -> None:
        """Wait for the last server, send, and tell each what became of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVE_S):
                await self._complete.wait()
        self._missing.clear()
        self._here = dict(sorted(self._here.items()))  # the same servers in the same order keep their group
        servers = [server for server, _ in self._here.values()]
        try:
            results = await self._circle.send(self.version, servers, self._timeout_s)
        except HeadwayError as error:
            log.info("%s is loaded from disk: %s", self.version.label, error)
            for _, outcome in self._here.values():
                _settle(outcome, False)
            return
        for (server, outcome), is_here in zip(list(self._here.values()), results, strict=True):
            _settle(outcome, True if is_here else UpdateFailed(f"{server.name} did not receive {self.version.label}"))

    def _look(self) -> None:
        if not self._missing and self._here:
            self._complete.set()


def _settle(outcome: "asyncio.Future[bool]", result: bool | UpdateFailed) -> None:
    if outcome.done():
        return
    if isinstance(result, bool):
        outcome.set_result(result)
    else:
        outcome.set_exception(result)


def _broadcasts(server: EngineServer) -> Broadcasts:
    assert isinstance(server.dialect, Broadcasts)
    return server.dialect
