"""The inference servers: who they are (by lease), which version they serve, and which of them takes a request.

    name-resolve --put, removed--> members --serving--> router --acquire--> a request's piece
    published version --move_to--> target of every member

Servers come and go at any time. A member is open to requests only while it is verified to serve a published version;
the fleet serves step s when every open server does. All servers are moved at once, or `max_unavailable` at a time.

Guarantee: `acquire` gives a request only to a server that serves a version it may use; waiting for one is bounded by
the request's own time limit, and shows in `waits` by name.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import orjson

from headway.core.evidence import Contradiction
from headway.core.routing import RoutingPolicy, Wanted
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, StaleVersion, TimedOut
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from services.rollout_controller.broadcast import Broadcast, Circle
from services.rollout_controller.engine_api import Dialect, ServerBusy, ServerGone, UpdateFailed
from services.rollout_controller.engine_client import FleetEngine
from services.rollout_controller.engine_http import EngineHttp, open_session
from services.rollout_controller.engine_server import EngineServer
from services.rollout_controller.fleet_member import EngineState, Member, UpdateTimes
from services.rollout_controller.gate import Gate
from services.rollout_controller.generation import Limits
from services.rollout_controller.sglang import Builtin, SGLang
from services.rollout_controller.vllm import VLLM
from services.rollout_controller.weight_source import WeightSource

log = logging.getLogger(__name__)
PREPARE_S = 60.0
"""How long a published folder may take to appear on this machine."""
LOOK_S = 0.05
MAX_KNOWN = 4096
MANIFEST = "manifest.json"
UNLIMITED = 1_000_000
DIALECTS: dict[str, Callable[[EngineHttp, float], Dialect]] = {
    "sglang": SGLang,
    "builtin": Builtin,
    "vllm": VLLM,
}
"""By the `engine` that a server's registration names."""


@dataclass(frozen=True)
class FleetOptions:
    """How the fleet behaves."""

    weights_root: Path
    """Holds a folder for each published version, by label."""
    policy: RoutingPolicy = RoutingPolicy.LEAST_LOAD
    request_timeout_s: float = 3600.0
    request_retries: int = 3
    """Pieces in a row that may bring nothing."""
    max_unavailable: int | None = None
    """Servers that may be updated at once; None: all."""
    update_timeout_s: float = 300.0
    pause_grace_s: float = 0.0
    """Requests get so long to end by themselves before an update pauses them."""
    setup_timeout_s: float | None = None
    """How long after the first published version the first server must be ready; None: for ever."""
    api_key: str = ""
    admin_key: str = ""
    """For pause, update and abort, where the engine has a key of its own for these; empty: the api key."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One server, as people see it."""

    name: str
    address: str
    engine: str
    version: str | None
    """The version that it was verified to serve."""
    state: EngineState
    tokens_in_flight: int
    """Prompts and budgets of the requests that it holds."""
    requests_running: int
    last_error: str
    since_s: float
    """How long it has been in its state."""
    last_update: UpdateTimes | None


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The fleet, as people see it."""

    target: str | None
    """The newest published version."""
    served_step: int | None
    requests_waiting: int
    """Requests that no server may take now."""
    engines: list[EngineStatus]


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How a move of the fleet ended."""

    version: PolicyVersion
    num_moved: int
    num_out: int
    """Servers that did not make it and are taken out."""
    pause_s: float
    """Longest pause of a server."""
    total_s: float


class Fleet:
    """The servers of one run. An async context manager; its members are kept by the given supervisor."""

    def __init__(
        self,
        options: FleetOptions,
        supervisor: Supervisor,
        waits: Waits,
        source: WeightSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` sends weights by broadcast; None: servers load them from disk."""
        self.limits = Limits()
        self.request_timeout_s = options.request_timeout_s
        self.request_retries = options.request_retries
        self.update_timeout_s = options.update_timeout_s
        self.pause_grace_s = options.pause_grace_s
        self.update_slot = asyncio.Semaphore(options.max_unavailable or UNLIMITED)
        self.target: PolicyVersion | None = None
        self._options = options
        self._supervisor = supervisor
        self._clock = clock
        self._gate = Gate(options.policy, waits, clock)
        self._members: dict[str, Member] = {}
        """By name."""
        self._by_key: dict[str, Member] = {}
        """By the router's key; also those that are leaving."""
        self._known: dict[PolicyVersion, None] = {}
        self._circle = Circle(source) if source is not None else None
        self._broadcast: Broadcast | None = None
        self._num_joined = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = open_session()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(member.server.close() for member in self._by_key.values()))
        if self._session is not None:
            await self._session.close()

    # ---- servers come and go

    def add(self, name: str, address: str, engine: str = "sglang") -> None:
        """Take in a server; one of the same name leaves.

        Raises:
            InvalidInput: No such engine is known.
        """
        if engine not in DIALECTS:
            raise InvalidInput(f"{name} runs {engine!r}; known engines are {', '.join(sorted(DIALECTS))}")
        if self._session is None:
            raise RuntimeError("a Fleet is used with `async with`")
        self.remove(name)
        http = EngineHttp(self._session, address, self._options.api_key, self._options.admin_key)
        self._num_joined += 1
        key = f"{name}#{self._num_joined}"
        server = EngineServer(key, f"{name} at {address}", engine, http, DIALECTS[engine](http, self.update_timeout_s))
        member = Member(name, server, self, self._clock)
        self._members[name] = self._by_key[key] = member
        self._gate.router.add(key)
        self._supervisor.start(f"keep {name}", self._keep(member))

    def remove(self, name: str) -> None:
        """The server's lease is gone: it takes nothing new; what it still makes may end."""
        member = self._members.pop(name, None)
        if member is not None:
            member.leave()

    async def _keep(self, member: Member) -> None:
        try:
            await member.keep()
        finally:
            del self._by_key[member.server.key]
            self._gate.router.remove(member.server.key)

    # ---- versions

    async def move_to(self, version: PolicyVersion) -> MoveReport:
        """Move every server to a newly published version; returns when none is on its way any more."""
        began = self._clock()
        self._learn(version)
        members = list(self._members.values())
        await self._gate.until(f"{len(members)} servers to load {version.label}", lambda: self._is_settled(version))
        moved = [member for member in members if member.serves(version)]
        pauses = [member.last_update.pause_s for member in moved if member.last_update is not None]
        report = MoveReport(
            version,
            num_moved=len(moved),
            num_out=sum(member.is_out for member in members),
            pause_s=max(pauses, default=0.0),
            total_s=self._clock() - began,
        )
        log.info(
            "%d of %d servers serve %s after %.3f s; longest pause %.3f s",
            report.num_moved,
            len(members),
            version.label,
            report.total_s,
            report.pause_s,
        )
        return report

    def _learn(self, version: PolicyVersion) -> None:
        if not self._known and self._options.setup_timeout_s is not None:
            self._supervisor.start("wait for the first server", self._expect_first_server(version))
        self._known[version] = None
        if len(self._known) > MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        if self.target is None or version > self.target:
            self.target = version
            self._begin_broadcast(version)
            for member in self._members.values():
                member.wake()
            self._gate.notify()

    def _begin_broadcast(self, version: PolicyVersion) -> None:
        """Those who serve now go to the version together."""
        if self._circle is not None:
            serving = [m.server for m in self._members.values() if m.state is EngineState.SERVING]
            self._broadcast = Broadcast(version, serving, self._circle, self.update_timeout_s, self._transfer)

    def _transfer(self, broadcast: Broadcast) -> None:
        self._supervisor.start(f"send {broadcast.version.label}", broadcast.transfer())

    async def prepare(self, member: Member, version: PolicyVersion, folder: Path) -> None:
        if self._broadcast_to(member, version) is None:
            await member.server.dialect.prepare(version, folder)

    async def load(self, member: Member, version: PolicyVersion, folder: Path) -> None:
        broadcast = self._broadcast_to(member, version)
        if broadcast is None or not await broadcast.arrive(member.server):
            await member.server.dialect.load(version, folder)

    def _broadcast_to(self, member: Member, version: PolicyVersion) -> Broadcast | None:
        """The broadcast that brings the version to this server; None: it loads from disk."""
        broadcast = self._broadcast
        is_for_it = broadcast is not None and broadcast.version == version and broadcast.awaits(member.server)
        return broadcast if is_for_it else None

    async def _expect_first_server(self, version: PolicyVersion) -> None:
        """Raises: TimedOut, when no server is ready in time; the message says what each one does instead."""
        try:
            async with asyncio.timeout(self._options.setup_timeout_s):
                await self.wait_for_step(version.step)
        except TimeoutError as error:
            states = ", ".join(f"{m.server.name} {m.state} {m.last_error}" for m in self._members.values())
            raise TimedOut(
                f"no inference server was ready within rollout.setup_timeout, {self._options.setup_timeout_s:g} s, "
                f"after {version.label} was published; registered: {states or 'none'}"
            ) from error

    def _is_settled(self, version: PolicyVersion) -> bool:
        return all(member.is_settled_for(version) for member in self._members.values())

    def is_known(self, version: PolicyVersion) -> bool:
        return version in self._known

    @property
    def served_step(self) -> int | None:
        """The lowest step among the versions of servers that take requests; None when there is none."""
        serving = (member.version for member in self._members.values() if member.state is EngineState.SERVING)
        return min((version.step for version in serving if version is not None), default=None)

    async def wait_for_step(self, step: int) -> None:
        """Return once every server that takes requests, and at least one, serves `step` or a later one."""
        await self._gate.until(f"the inference servers to serve step {step}", lambda: self._serves(step))

    def _serves(self, step: int) -> bool:
        served = self.served_step
        return served is not None and served >= step

    async def prepared(self, version: PolicyVersion) -> Path:
        folder = self._options.weights_root / version.label
        deadline = self._clock() + PREPARE_S
        while not await asyncio.to_thread((folder / MANIFEST).is_file):
            if self._clock() > deadline:
                raise UpdateFailed(f"{folder} was published, but has no {MANIFEST} here")
            await asyncio.sleep(LOOK_S)
        if self.limits.vocabulary is None:
            vocabulary = await asyncio.to_thread(_vocabulary_of, folder)
            self.limits = Limits(self.limits.context_length, vocabulary)
        return folder

    # ---- requests

    def engine(self, pinned: PolicyVersion | None = None) -> FleetEngine:
        """An engine for workflows; pinned: every token is made by this version."""
        return FleetEngine(self, pinned)

    async def acquire(self, wanted: Wanted) -> EngineServer:
        """Wait for a server that may take the request; `release` must follow.

        Raises:
            StaleVersion: The request is pinned to a version that is not served any more.
        """
        key = await self._gate.acquire(wanted, lambda: self._check_pin(wanted))
        return self._by_key[key].server

    def _check_pin(self, wanted: Wanted) -> None:
        pinned, target = wanted.exactly, self.target
        if pinned is not None and target is not None and pinned < target:
            raise StaleVersion(f"a request is pinned to {pinned.label}, but {target.label} was published")

    def release(self, server: EngineServer, wanted: Wanted, failure: Exception | None, has_ended: bool) -> None:
        is_bad = failure is not None and not isinstance(failure, ServerBusy)
        self._gate.release(server.key, wanted, None if not has_ended or isinstance(failure, ServerBusy) else not is_bad)
        member = self._by_key.get(server.key)
        if isinstance(failure, ServerGone):
            self._gate.trip(server.key)
        if member is not None and isinstance(failure, ServerGone | Contradiction):
            member.suspect(str(failure))

    # ---- members call in

    def has_other(self, member: Member) -> bool:
        others = (other for other in self._members.values() if other is not member)
        return any(other.state is EngineState.SERVING for other in others)

    def on_member_change(self, member: Member) -> None:
        router, key = self._gate.router, member.server.key
        if member.state is EngineState.SERVING and member.version is not None:
            router.open(key, member.version)
            self._note_context(member)
        else:
            router.close(key)
        if self._broadcast is not None and member.state not in (EngineState.SERVING, EngineState.UPDATING):
            self._broadcast.drop(member.server)
        self._gate.notify()

    def _note_context(self, member: Member) -> None:
        context = member.facts.context_length if member.facts is not None else None
        if context is not None:
            shortest = min(context, self.limits.context_length or context)
            self.limits = Limits(shortest, self.limits.vocabulary)

    # ---- what people see

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(
            target=self.target.label if self.target is not None else None,
            served_step=self.served_step,
            requests_waiting=self._gate.num_waiting,
            engines=[self._status_of(member) for member in self._by_key.values()],
        )

    def _status_of(self, member: Member) -> EngineStatus:
        server, load = member.server, self._gate.router.load(member.server.key)
        return EngineStatus(
            name=member.name,
            address=server.http.url,
            engine=server.engine,
            version=member.version.label if member.version is not None else None,
            state=member.state,
            tokens_in_flight=load.tokens,
            requests_running=load.requests,
            last_error=member.last_error,
            since_s=self._clock() - member.since,
            last_update=member.last_update,
        )


def _vocabulary_of(folder: Path) -> int | None:
    """The size of the model's vocabulary, by its config.json."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None
