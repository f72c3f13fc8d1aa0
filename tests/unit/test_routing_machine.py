"""Whatever happens to the servers: a request only goes where it may, and the loads are what is in flight."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.core.routing import Router, RoutingPolicy, Wanted
from headway.core.version import PolicyVersion

NAMES = st.sampled_from(["a", "b", "c", "d"])
VERSIONS = st.builds(PolicyVersion, st.just(1), st.integers(0, 3))


class Routing(RuleBasedStateMachine):
    """Servers come, go, fail and change versions, while requests are given out and taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RoutingPolicy.PREFIX_AFFINITY)
        self.now = 0.0
        self.open: dict[str, PolicyVersion] = {}
        self.known: set[str] = set()
        self.in_flight: list[tuple[str, int]] = []
        self.down_until: dict[str, float] = {}

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name not in self.known:
            self.known.add(name)
            self.router.add(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), version=VERSIONS)
    def serve(self, data: st.DataObject, version: PolicyVersion) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.router.open(name, version)
        self.open[name] = version

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.router.close(name)
        self.open.pop(name, None)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.router.remove(name)
        self.known.discard(name)
        self.open.pop(name, None)
        self.down_until.pop(name, None)
        self.in_flight = [(server, tokens) for server, tokens in self.in_flight if server != name]

    @rule(seconds=st.floats(0.01, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        if self.now >= self.down_until.get(name, 0.0):
            self.down_until[name] = self.now + 0.49
        self.router.trip(name, self.now)

    @rule(
        tokens=st.integers(1, 1000),
        key=st.sampled_from(["", "x", "y"]),
        at_least=st.none() | VERSIONS,
        exactly=st.none() | VERSIONS,
        avoid=st.frozensets(NAMES),
    )
    def request(
        self,
        tokens: int,
        key: str,
        at_least: PolicyVersion | None,
        exactly: PolicyVersion | None,
        avoid: frozenset[str],
    ) -> None:
        chosen = self.router.choose(Wanted(tokens, key, at_least, exactly, avoid), self.now)
        if chosen is None:
            return
        version = self.open[chosen]
        assert at_least is None or version >= at_least
        assert exactly is None or version == exactly
        assert self.now >= self.down_until.get(chosen, 0.0)
        self.in_flight.append((chosen, tokens))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), is_success=st.sampled_from([True, None]))
    def end(self, data: st.DataObject, is_success: bool | None) -> None:
        server, tokens = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.router.release(server, tokens, self.now, is_success)
        if is_success:
            self.down_until.pop(server, None)

    @invariant()
    def loads_are_what_is_in_flight(self) -> None:
        for name in self.known:
            held = [tokens for server, tokens in self.in_flight if server == name]
            assert (self.router.load(name).tokens, self.router.load(name).requests) == (sum(held), len(held))


Routing.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_routing = Routing.TestCase
