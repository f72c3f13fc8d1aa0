"""Decide which server takes a request.

    round_robin      in turn
    least_load       the fewest tokens in flight (prompt and budget of the requests that it holds)
    prefix_affinity  where the same key (a task, a conversation) went before, so that its prefix is cached there;
                     unless that server holds far more than the others: then as least_load

A server takes requests while the fleet has it open, its version is one that the request may use, and its breaker (see
`headway.core.breaker`) lets it.

Guarantee: a request is only ever given to a server that is open, allowed by its breaker, and of a permitted version.
The tokens in flight of a server are exactly those of the requests given to it and not yet released.

Pure: time is an argument, seconds on any clock that does not go back.
"""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field
from enum import StrEnum

from headway.core.breaker import Breaker
from headway.core.version import PolicyVersion

MAX_KEYS = 65_536
"""Keys whose server is remembered; the least recently used is forgotten first."""
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 64
"""A key leaves its server at more than FACTOR times the mean load and SLACK times this request's tokens."""


class RoutingPolicy(StrEnum):
    """How a server is chosen among those that may take a request."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    PREFIX_AFFINITY = "prefix_affinity"


@dataclass(slots=True)
class Load:
    """What the router knows of a server."""

    version: PolicyVersion | None = None
    is_open: bool = False
    tokens: int = 0
    requests: int = 0
    busy_s: float = 0.0
    """How long it has had a request, but for the time since `busy_since`."""
    busy_since: float = 0.0
    """Since when it has had one, where it has."""
    breaker: Breaker = field(default_factory=Breaker)

    def busy_until(self, now: float) -> float:
        """For how long it has had a request, seconds."""
        return self.busy_s + (now - self.busy_since if self.requests else 0.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of its server."""

    tokens: int
    """Prompt and budget."""
    key: str = ""
    """Requests of one key share a prefix; empty: none."""
    at_least: PolicyVersion | None = None
    """The version of the tokens that the request already has: versions never fall within a sample."""
    exactly: PolicyVersion | None = None
    """Pinned: only this version will do."""
    avoid: Set[str] = frozenset()
    """Servers that just failed this request; taken only when there is no other."""

    def accepts(self, version: PolicyVersion | None) -> bool:
        if version is None or (self.exactly is not None and version != self.exactly):
            return False
        return self.at_least is None or version >= self.at_least


class Router:
    """Servers by name, and the policy that chooses among them."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._servers: dict[str, Load] = {}
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._turn = 0

    def add(self, server: str) -> None:
        """Know a server; it takes nothing before `open`."""
        self._servers[server] = Load()

    def remove(self, server: str) -> None:
        """Forget a server; releases that come later are ignored."""
        self._servers.pop(server, None)

    def open(self, server: str, version: PolicyVersion) -> None:
        """The server serves this version, verified."""
        load = self._servers[server]
        load.version, load.is_open = version, True

    def close(self, server: str) -> None:
        """No new requests: the server is being updated, or is out."""
        self._servers[server].is_open = False

    def load(self, server: str) -> Load:
        return self._servers[server]

    def choose(self, wanted: Wanted, now: float) -> str | None:
        """Give the request to a server; None when none may take it now. `release` must follow."""
        fit = [name for name, load in self._servers.items() if self._may_take(load, wanted, now)]
        fit = [name for name in fit if name not in wanted.avoid] or fit
        if not fit:
            return None
        chosen = self._pick(fit, wanted)
        load = self._servers[chosen]
        if not load.requests:
            load.busy_since = now
        load.tokens += wanted.tokens
        load.requests += 1
        load.breaker.begin()
        return chosen

    def release(self, server: str, tokens: int, now: float, is_success: bool | None) -> None:
        """A request has left its server: well, badly, or (None) in a way that says nothing about the server."""
        load = self._servers.get(server)
        if load is None or load.requests == 0:
            return
        load.busy_s = load.busy_until(now)
        load.busy_since = now
        load.tokens -= tokens
        load.requests -= 1
        if is_success:
            load.breaker.succeed()
        elif is_success is None:
            load.breaker.give_up_trial()
        else:
            load.breaker.fail(now)

    def trip(self, server: str, now: float) -> None:
        """The server is known to be down."""
        load = self._servers.get(server)
        if load is not None:
            load.breaker.trip(now)

    def next_trial(self, now: float) -> float | None:
        """When the next breaker becomes half-open; None when nothing changes by time alone."""
        times = [load.breaker.opened_until for load in self._servers.values() if load.is_open]
        return min((time for time in times if time is not None and time > now), default=None)

    @staticmethod
    def _may_take(load: Load, wanted: Wanted, now: float) -> bool:
        return load.is_open and wanted.accepts(load.version) and load.breaker.allows(now)

    def _pick(self, fit: list[str], wanted: Wanted) -> str:
        if self._policy is RoutingPolicy.ROUND_ROBIN or len(fit) == 1:
            self._turn += 1
            return fit[self._turn % len(fit)]
        least = min(fit, key=self._tokens_of)
        if self._policy is RoutingPolicy.LEAST_LOAD or not wanted.key:
            return least
        return self._by_key(fit, least, wanted)

    def _by_key(self, fit: list[str], least: str, wanted: Wanted) -> str:
        """Where the key went before, unless that server is overloaded or may not take it."""
        home = self._keys.get(wanted.key)
        mean = sum(map(self._tokens_of, fit)) / len(fit)
        limit = OVERLOAD_FACTOR * mean + OVERLOAD_SLACK * wanted.tokens
        if home is None or home not in fit or self._tokens_of(home) > limit:
            home = self._keys[wanted.key] = least
        self._keys.move_to_end(wanted.key)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return home

    def _tokens_of(self, server: str) -> int:
        return self._servers[server].tokens
