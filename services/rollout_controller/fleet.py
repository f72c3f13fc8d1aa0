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

from headway.core.evidence import Contradiction
from headway.core.routing import RoutingPolicy, Wanted
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, NotFound, StaleVersion, TimedOut
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from services.rollout_controller.delivery import Delivery
from services.rollout_controller.engine_api import Dialect, ServerBusy, ServerGone
from services.rollout_controller.engine_client import FleetEngine
from services.rollout_controller.engine_http import EngineHttp, open_session
from services.rollout_controller.engine_server import EngineServer
from services.rollout_controller.fleet_member import EngineState, Member
from services.rollout_controller.fleet_status import EngineStatus, FleetSnapshot, MoveReport
from services.rollout_controller.gate import Gate
from services.rollout_controller.generation import Limits
from services.rollout_controller.sglang import Builtin, SGLang
from services.rollout_controller.sglang_adapters import SGLangAdapters
from services.rollout_controller.vllm import VLLM
from services.rollout_controller.weight_source import WeightSource

log = logging.getLogger(__name__)
MAX_KNOWN = 4096
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
    lora_name: str | None = None
    """Versions are adapters, which engines know by this name and the version; None: they are whole models."""
    admin_key: str = ""
    """For pause, update and abort, where the engine has a key of its own for these; empty: the api key."""


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
        self._context_length: int | None = None
        """The shortest of all servers."""
        self.request_timeout_s = options.request_timeout_s
        self.request_retries = options.request_retries
        self.update_timeout_s = options.update_timeout_s
        self.pause_grace_s = options.pause_grace_s
        self.update_slot = asyncio.Semaphore(options.max_unavailable or UNLIMITED)
        self.target: PolicyVersion | None = None
        self.delivery = Delivery(options.weights_root, source, options.update_timeout_s, supervisor, clock)
        self._options = options
        self._supervisor = supervisor
        self._clock = clock
        self._gate = Gate(options.policy, waits, clock)
        self._members: dict[str, Member] = {}
        """By name."""
        self._by_key: dict[str, Member] = {}
        """By the router's key; also those that are leaving."""
        self._known: dict[PolicyVersion, None] = {}
        self._num_joined = 0
        self.drained: dict[str, str] = {}
        """Servers that people took out of routing: addresses by name. One that comes back elsewhere is a new one."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a server has changed its state."""
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
            InvalidInput: No such engine is known, or it takes no adapters.
        """
        if engine not in DIALECTS:
            raise InvalidInput(f"{name} runs {engine!r}; known engines are {', '.join(sorted(DIALECTS))}")
        if self._session is None:
            raise RuntimeError("a Fleet is used with `async with`")
        self.remove(name)
        http = EngineHttp(self._session, address, self._options.api_key, self._options.admin_key)
        self._num_joined += 1
        key = f"{name}#{self._num_joined}"
        server = EngineServer(key, f"{name} at {address}", engine, http, self._dialect(engine, http))
        member = Member(name, server, self, self._clock)
        member.is_drained = self.drained.get(name) == http.url
        self._members[name] = self._by_key[key] = member
        self._gate.router.add(key)
        self._supervisor.start(f"keep {name}", self._keep(member))

    def _dialect(self, engine: str, http: EngineHttp) -> Dialect:
        if self._options.lora_name is None:
            return DIALECTS[engine](http, self.update_timeout_s)
        if engine == "vllm":
            raise InvalidInput("adapters (actor.use_lora) are served by SGLang and the built-in engine, not by vLLM")
        return SGLangAdapters(http, self.update_timeout_s, self._options.lora_name)

    def remove(self, name: str) -> None:
        """The server's lease is gone: it takes nothing new; what it still makes may end."""
        member = self._members.pop(name, None)
        if member is not None:
            member.leave()

    def drain(self, name: str, is_drained: bool) -> None:
        """Take a server out of routing, or back; requests that it has go on there.

        Raises:
            NotFound: There is no such server.
        """
        member = self._members.get(name)
        if member is None:
            raise NotFound(f"no server {name} is registered; there are {', '.join(sorted(self._members)) or 'none'}")
        member.is_drained = is_drained
        self.drained.pop(name, None)
        if is_drained:
            self.drained[name] = member.server.http.url
        self.on_member_change(member)

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
        updates = [member.last_update for member in moved if member.last_update is not None]
        report = MoveReport(
            version,
            num_moved=len(moved),
            num_out=sum(member.is_out for member in members),
            prepare_s=max((update.prepare_s for update in updates), default=0.0),
            pause_s=max((update.pause_s for update in updates), default=0.0),
            load_s=max((update.load_s for update in updates), default=0.0),
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
            self.delivery.begin(version, [m.server for m in self._members.values() if m.state is EngineState.SERVING])
            for member in self._members.values():
                member.wake()
            self._gate.notify()

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
        others = (other for other in self._members.values() if other is not member and not other.is_drained)
        return any(other.state is EngineState.SERVING for other in others)

    def on_member_change(self, member: Member) -> None:
        router, key = self._gate.router, member.server.key
        if member.state is EngineState.SERVING and member.version is not None and not member.is_drained:
            router.open(key, member.version)
            self._note_context(member)
        else:
            router.close(key)
        if member.state not in (EngineState.SERVING, EngineState.UPDATING):
            self.delivery.drop(member.server)
        self._gate.notify()
        self.on_change()

    def _note_context(self, member: Member) -> None:
        context = member.facts.context_length if member.facts is not None else None
        if context is not None:
            self._context_length = min(context, self._context_length or context)

    @property
    def limits(self) -> Limits:
        """What every request must fit into."""
        return Limits(self._context_length, self.delivery.vocabulary)

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
            busy_s=load.busy_until(self._clock()),
            joined_s=self._clock() - member.joined_at,
            last_error=member.last_error,
            since_s=self._clock() - member.since,
            last_update=member.last_update,
            is_drained=member.is_drained,
        )
