"""How a version's weights reach a paused server: it reads them from the shared folder, or the trainer broadcasts them.

Broadcast is for the servers that were open when the version was published, and only where the trainer holds it; all
others, and every second try, read from disk. Either way the server has to report the version afterwards.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import orjson

from headway.core.version import PolicyVersion
from headway.runtime.published import MANIFEST, read_published
from headway.runtime.supervisor import Supervisor
from services.rollout_controller.broadcast import Broadcast, Circle
from services.rollout_controller.engine_api import UpdateFailed
from services.rollout_controller.engine_server import EngineServer
from services.rollout_controller.weight_source import WeightSource

PREPARE_S = 60.0
"""How long a published folder may take to appear on this machine."""
LOOK_S = 0.05


class Delivery:
    """Brings weights to servers.

    Args:
        root: Holds a folder for each published version, by label.
        source: Sends by broadcast; None: servers read from disk.
        timeout_s: Of one transfer.
        supervisor: Runs transfers.
    """

    def __init__(
        self,
        root: Path,
        source: WeightSource | None,
        timeout_s: float,
        supervisor: Supervisor,
        clock: Callable[[], float],
    ) -> None:
        self.vocabulary: int | None = None
        """Size of the model's vocabulary, once a folder was seen."""
        self._root = root
        self._circle = Circle(source) if source is not None else None
        self._timeout_s = timeout_s
        self._supervisor = supervisor
        self._clock = clock
        self._broadcast: Broadcast | None = None

    def begin(self, version: PolicyVersion, servers: Iterable[EngineServer]) -> None:
        """A version was published: these servers, which are open, go to it together."""
        if self._circle is not None:
            self._broadcast = Broadcast(version, servers, self._circle, self._timeout_s, self._transfer)

    def drop(self, server: EngineServer) -> None:
        """The server is out: nobody waits for it."""
        if self._broadcast is not None:
            self._broadcast.drop(server)

    async def folder(self, version: PolicyVersion) -> Path:
        """The version's folder, once it can be seen.

        Raises:
            UpdateFailed: It does not appear.
        """
        folder = self._root / version.label
        deadline = self._clock() + PREPARE_S
        while not await asyncio.to_thread((folder / MANIFEST).is_file):
            if self._clock() > deadline:
                raise UpdateFailed(f"{folder} was published, but has no {MANIFEST} here")
            await asyncio.sleep(LOOK_S)
        if self.vocabulary is None:
            self.vocabulary = await asyncio.to_thread(lambda: _vocabulary_of(read_published(folder).model))
        return folder

    async def prepare(self, server: EngineServer, version: PolicyVersion, folder: Path) -> None:
        """Do what of a load can be done while requests run.

        Raises:
            UpdateFailed, ServerFailed: The weights cannot be loaded.
        """
        if self._broadcast_to(server, version) is None:
            await server.dialect.prepare(version, folder)

    async def load(self, server: EngineServer, version: PolicyVersion, folder: Path) -> None:
        """Bring the weights into the paused server.

        Raises:
            UpdateFailed, ServerFailed: It does not report them.
        """
        broadcast = self._broadcast_to(server, version)
        if broadcast is None or not await broadcast.arrive(server):
            await server.dialect.load(version, folder)

    def _broadcast_to(self, server: EngineServer, version: PolicyVersion) -> Broadcast | None:
        """The broadcast that brings the version to this server; None: it reads from disk."""
        broadcast = self._broadcast
        is_for_it = broadcast is not None and broadcast.version == version and broadcast.awaits(server)
        return broadcast if is_for_it else None

    def _transfer(self, broadcast: Broadcast) -> None:
        self._supervisor.start(f"send {broadcast.version.label}", broadcast.transfer())


def _vocabulary_of(folder: Path) -> int | None:
    """The size of the model's vocabulary, by its config.json."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None
