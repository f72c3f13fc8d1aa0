"""Each policy chooses as it says, and the breaker keeps requests from a server that fails until a trial succeeds."""

import pytest

from headway.core.breaker import Breaker
from headway.core.routing import OVERLOAD_SLACK, Router, RoutingPolicy, Wanted
from headway.core.version import PolicyVersion

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def router_of(policy: RoutingPolicy, *servers: str, version: PolicyVersion = V0) -> Router:
    router = Router(policy)
    for server in servers:
        router.add(server)
        router.open(server, version)
    return router


def test_round_robin_takes_turns() -> None:
    router = router_of(RoutingPolicy.ROUND_ROBIN, "a", "b", "c")
    chosen = [router.choose(Wanted(10), now=0.0) for _ in range(6)]
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[:3] == chosen[3:]


def test_least_load_counts_tokens_not_requests() -> None:
    router = router_of(RoutingPolicy.LEAST_LOAD, "a", "b")
    long = router.choose(Wanted(1000), now=0.0)
    short = [router.choose(Wanted(10), now=0.0) for _ in range(5)]
    assert long not in short


def test_a_group_stays_together() -> None:
    router = router_of(RoutingPolicy.PREFIX_AFFINITY, "a", "b", "c")
    homes = {key: {router.choose(Wanted(500, key), now=0.0) for _ in range(16)} for key in "uvwxyz"}
    assert all(len(servers) == 1 for servers in homes.values())


def test_groups_spread_over_the_servers() -> None:
    router = router_of(RoutingPolicy.PREFIX_AFFINITY, "a", "b", "c")
    for key in range(9):
        for _ in range(16):
            router.choose(Wanted(500, str(key)), now=0.0)
    assert {router.load(server).requests for server in "abc"} == {48}


def test_a_key_leaves_a_server_that_holds_far_more_than_the_others() -> None:
    router = router_of(RoutingPolicy.PREFIX_AFFINITY, "a", "b")
    chosen = [router.choose(Wanted(10, "one key"), now=0.0) for _ in range(8 * OVERLOAD_SLACK)]
    assert set(chosen) == {"a", "b"}


def test_without_a_key_affinity_is_least_load() -> None:
    router = router_of(RoutingPolicy.PREFIX_AFFINITY, "a", "b")
    assert {router.choose(Wanted(10), now=0.0) for _ in range(2)} == {"a", "b"}


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_versions_never_fall_within_a_sample(policy: RoutingPolicy) -> None:
    router = router_of(policy, "old", "new")
    router.open("new", V1)
    assert {router.choose(Wanted(1, "k", at_least=V1), now=0.0) for _ in range(20)} == {"new"}


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_a_pinned_request_gets_its_version_or_waits(policy: RoutingPolicy) -> None:
    router = router_of(policy, "old", "new")
    router.open("new", V1)
    assert router.choose(Wanted(1, exactly=V0), now=0.0) == "old"
    router.open("old", V1)
    assert router.choose(Wanted(1, exactly=V0), now=0.0) is None


def test_a_server_that_just_failed_the_request_is_avoided_while_there_is_another() -> None:
    router = router_of(RoutingPolicy.ROUND_ROBIN, "a", "b")
    assert {router.choose(Wanted(1, avoid={"a"}), now=0.0) for _ in range(4)} == {"b"}
    router.close("b")
    assert router.choose(Wanted(1, avoid={"a"}), now=0.0) == "a"


def test_failures_in_a_row_open_the_breaker_and_one_trial_closes_it() -> None:
    router = router_of(RoutingPolicy.LEAST_LOAD, "a")
    for _ in range(3):
        router.choose(Wanted(5), now=0.0)
        router.release("a", 5, now=0.0, is_success=False)
    assert router.choose(Wanted(5), now=0.1) is None
    trial_at = router.next_trial(now=0.1)
    assert trial_at is not None
    assert router.choose(Wanted(5), now=trial_at) == "a"
    assert router.choose(Wanted(5), now=trial_at) is None, "one trial at a time"
    router.release("a", 5, now=trial_at, is_success=True)
    assert [router.choose(Wanted(5), now=trial_at) for _ in range(4)] == ["a"] * 4


def test_a_success_in_between_keeps_the_breaker_closed() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.fail(now=0.0)
        breaker.fail(now=0.0)
        breaker.succeed()
    assert breaker.allows(now=0.0)


def test_the_pause_doubles_with_each_failed_trial_up_to_a_limit() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    breaker.trip(now)
    for _ in range(8):
        assert breaker.opened_until is not None
        pauses.append(breaker.opened_until - now)
        now = breaker.opened_until
        breaker.begin()
        breaker.fail(now)
    assert pauses == [0.5, 1, 2, 4, 8, 8, 8, 8]


def test_one_outage_reported_by_many_requests_is_one_outage() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.trip(now=0.0)
    assert breaker.allows(now=0.5)


def test_a_withdrawn_trial_lets_another_one_begin() -> None:
    router = router_of(RoutingPolicy.LEAST_LOAD, "a")
    router.trip("a", now=0.0)
    assert router.choose(Wanted(5), now=1.0) == "a"
    router.release("a", 5, now=1.0, is_success=None)
    assert router.choose(Wanted(5), now=1.0) == "a"
