"""One server of the fleet: brought to the published version, given requests, watched, moved, taken out when it fails.

    joining --verified--> serving --newer version--> updating --verified--> serving
                             |                          |
                             | silent, broken           | did not load, does not report the version
                             v                          v
                          silent ----------------->  failed --backoff--> tried again from the start
                             |
       lease gone: leaving --+-> its requests end or go on elsewhere, then it is forgotten

Guarantee: the server is open to requests only while it is known to report the version that the router believes it to
serve. A server whose update failed is left paused: its requests go on elsewhere, and nothing is generated with
unknown weights.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError
from services.rollout_controller.delivery import Delivery
from services.rollout_controller.engine_api import Facts, ServerFailed, ServerGone, ServerSilent, UpdateFailed
from services.rollout_controller.engine_server import EngineServer

log = logging.getLogger(__name__)
PROBE_S = 0.5
FIRST_PATIENCE_S = 2.0
LONGEST_PATIENCE_S = 30.0
"""An open server that does not answer for so long counts as silent. After each false alarm it is given twice the time:
on a busy machine servers are slow, and moving their requests makes them slower."""
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 15.0


class EngineState(StrEnum):
    """Whether a server is given requests, and if not, why."""

    JOINING = "joining"
    """Being verified."""
    UPDATING = "updating"
    """Being moved to another version."""
    SERVING = "serving"
    SILENT = "silent"
    """Does not answer, or broke a connection."""
    FAILED = "failed"
    """Did not take the weights, or is not what it should be; tried again after a while."""
    LEAVING = "leaving"
    """Its lease is gone; requests that it still holds may end."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """How long a server's last update took, in seconds."""

    version: PolicyVersion
    prepare_s: float
    """Before the pause, while requests went on."""
    pause_s: float
    """No request of the server advanced for so long."""
    load_s: float
    """Of it, in loading and verifying."""


class Host(Protocol):
    """What a member needs of its fleet."""

    update_timeout_s: float
    pause_grace_s: float
    update_slot: asyncio.Semaphore
    """Held while a server is being updated: how many may be so at once."""
    target: PolicyVersion | None
    """The newest published version."""
    delivery: Delivery

    def has_other(self, member: "Member") -> bool:
        """Whether another server could take over its requests."""
        ...

    def on_member_change(self, member: "Member") -> None: ...


class Member:
    """A server and the loop that keeps it."""

    def __init__(self, name: str, server: EngineServer, host: Host, clock: Callable[[], float]) -> None:
        self.name = name
        self.server = server
        self.state = EngineState.JOINING
        self.version: PolicyVersion | None = None
        """Verified."""
        self.facts: Facts | None = None
        self.last_error = ""
        self.joined_at = self.since = clock()
        """When the state began."""
        self.last_update: UpdateTimes | None = None
        self.is_drained = False
        """People took it out of routing: it is kept and moved as the others, and given no requests."""
        self._host = host
        self._clock = clock
        self._wake = asyncio.Event()
        self._retry_s = FIRST_RETRY_S
        self._patience_s = FIRST_PATIENCE_S
        self._was_silent = False

    def is_settled_for(self, version: PolicyVersion) -> bool:
        """Whether it has the version, or will not have it soon: it is out, on its way in or on its way out."""
        return self.serves(version) or self.state not in (EngineState.SERVING, EngineState.UPDATING)

    def serves(self, version: PolicyVersion) -> bool:
        """Whether it takes requests, with this version or a later one."""
        return self.state is EngineState.SERVING and self.version is not None and self.version >= version

    @property
    def is_out(self) -> bool:
        return self.state in (EngineState.SILENT, EngineState.FAILED)

    @property
    def _is_leaving(self) -> bool:
        return self.state is EngineState.LEAVING

    def wake(self) -> None:
        """The target has changed, or something was seen that should be looked at."""
        self._wake.set()

    def suspect(self, reason: str) -> None:
        """A request met a broken connection: no more of them until the server was seen alive and verified."""
        if self.state is EngineState.SERVING:
            self._enter(EngineState.SILENT, reason)
            self.wake()

    def leave(self) -> None:
        """The lease is gone."""
        self._enter(EngineState.LEAVING)
        self.wake()

    async def keep(self) -> None:
        """Run the server's life; returns when it has left and holds no request.

        waits for: a newer target, a suspicion, the next probe      unblocked by: `wake`, time
        """
        while not self._is_leaving:
            try:
                if self.state is not EngineState.SERVING:
                    await self._verify()
                await self._move()
                await self._watch()
            except HeadwayError as error:
                await self._out(error)
        await self._drain()

    async def _verify(self) -> None:
        """Learn what the server is and serves."""
        self.facts = await self.server.dialect.facts()
        self.server.knows_stop_strings = self.facts.has_tokenizer
        try:
            self.version = PolicyVersion.parse(self.facts.label)
        except ValueError:
            self.version = None

    async def _move(self) -> None:
        """Bring the server to the target, where it is not there yet, and open it."""
        target = await self._target()
        if self._is_leaving:
            return
        folder = await self._host.delivery.folder(target)
        if self.version != target:
            async with self._host.update_slot:
                await self._update(target, folder)
        elif self.state is not EngineState.SERVING and not await self._is_ready():
            await self.server.dialect.resume()  # left paused by an update that nobody finished
            await self._require_ready()
        self.version, self.server.label = target, target.label
        self.last_error, self._retry_s = "", FIRST_RETRY_S
        if self._was_silent:
            self._patience_s = min(2 * self._patience_s, LONGEST_PATIENCE_S)
            self._was_silent = False
        if not self._is_leaving:
            self._enter(EngineState.SERVING)

    async def _target(self) -> PolicyVersion:
        """The published version; a server that is ahead of what this process has heard of waits for the news."""
        while True:
            target = self._host.target
            is_ahead = target is not None and self.version is not None and self.version > target
            if target is not None and not is_ahead:
                return target
            await self._wake.wait()
            self._wake.clear()
            if self._is_leaving:
                return target or PolicyVersion(0, 0)

    async def _require_ready(self) -> None:
        if not await self._is_ready():
            raise ServerFailed(f"{self.server.name} says that it is not ready")

    async def _is_ready(self) -> bool:
        has_requests = self.state in (EngineState.SERVING, EngineState.LEAVING)
        return await self.server.dialect.is_ready(self._patience_s if has_requests else LONGEST_PATIENCE_S)

    async def _update(self, target: PolicyVersion, folder: Path) -> None:
        """Prepare, pause, load, verify, continue.

        Raises:
            UpdateFailed, ServerFailed: The server stays as it is then, paused unless it could not even prepare; nothing
                is generated with unknown weights.
        """
        dialect, prepares = self.server.dialect, self._clock()
        try:
            async with asyncio.timeout(self._host.update_timeout_s):
                await self._host.delivery.prepare(self.server, target, folder)
                prepared = self._clock()
                self._enter(EngineState.UPDATING)
                await self.server.wait_until_idle(self._host.pause_grace_s)
                began = self._clock()
                await self.server.pause()
                paused = self._clock()
                await self._host.delivery.load(self.server, target, folder)
                loaded = self._clock()
                self.server.label = target.label
                await dialect.resume()
        except TimeoutError as error:
            limit_s = self._host.update_timeout_s
            raise UpdateFailed(f"{self.server.name} did not load {target.label} within {limit_s:g} s") from error
        prepare_s, pause_s = prepared - prepares, self._clock() - began
        self.last_update = UpdateTimes(target, prepare_s, pause_s, load_s=loaded - paused)

    async def _watch(self) -> None:
        """Watch an open server until it must be moved, or leaves.

        Raises:
            ServerFailed: It is silent, or says that it is not ready.
        """
        while self.state is EngineState.SERVING and self.version == self._host.target:
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self._wake.wait()
            if not self._wake.is_set():
                await self._probe()
            self._wake.clear()

    async def _probe(self) -> None:
        """Ask whether it is ready. One that sends tokens is alive, however long the answer takes."""
        events = self.server.num_events
        try:
            await self._require_ready()
        except ServerSilent:
            if self.server.num_events == events:
                raise

    async def _out(self, error: HeadwayError) -> None:
        """Take the server out, let its requests go on elsewhere, and wait before the next try."""
        if self._is_leaving:
            return
        if str(error) != self.last_error:
            log.warning("%s is taken out: %s", self.server.name, error)
        self.last_error = str(error)
        self._was_silent = isinstance(error, ServerSilent)
        is_silent = isinstance(error, ServerFailed) and self.state in (EngineState.SERVING, EngineState.SILENT)
        self._enter(EngineState.SILENT if is_silent else EngineState.FAILED)
        if isinstance(error, ServerGone | UpdateFailed) or self._host.has_other(self):
            self.server.lose(f"{self.server.name} was taken out: {error}")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._retry_s):
                await self._wake.wait()
        self._wake.clear()
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    async def _drain(self) -> None:
        """Let requests of a server whose lease is gone end, for as long as it answers."""
        while self.server.num_open:
            try:
                await self._is_ready()
            except ServerFailed as error:
                self.server.lose(f"{self.server.name} has left: {error}")
            await asyncio.sleep(PROBE_S)
        await self.server.close()

    def _enter(self, state: EngineState, reason: str = "") -> None:
        self.last_error = reason or self.last_error
        if state is not self.state:
            self.state, self.since = state, self._clock()
        self._host.on_member_change(self)
