"""The budget answers AReaL's formula, counts what is really out, and is never overdrawn or negative."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.core.staleness import StalenessManager


class Served:
    """A version provider that is moved by hand."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version


def make(concurrent: int = 1000, batch: int = 4, eta: int = 2, version: int = 0) -> tuple[StalenessManager, Served]:
    served = Served(version)
    return StalenessManager(served, concurrent, batch, eta), served


def run(manager: StalenessManager, accepted: int = 0, rejected: int = 0, running: int = 0) -> None:
    for _ in range(accepted + rejected + running):
        manager.on_rollout_enqueued()
        manager.on_rollout_submitted()
    for _ in range(accepted):
        manager.on_rollout_accepted()
    for _ in range(rejected):
        manager.on_rollout_rejected()


@pytest.mark.parametrize("eta", [0, 1, 5])
@pytest.mark.parametrize("version", [0, 3, 1000])
def test_the_capacity_is_areals_formula(eta: int, version: int) -> None:
    manager, served = make(concurrent=10**9, batch=8, eta=eta)
    run(manager, accepted=5, rejected=3, running=2)
    served.version = version
    assert manager.get_capacity() == (eta + version + 1) * 8 - (5 + 2)


def test_concurrency_limits_too() -> None:
    manager, _ = make(concurrent=10)
    run(manager, running=7)
    assert manager.get_capacity() == 3


def test_more_out_than_allowed_is_a_negative_capacity() -> None:
    manager, _ = make(concurrent=3, batch=2, eta=1)
    run(manager, running=10)
    assert manager.get_capacity() < 0


def test_a_concurrency_or_batch_of_zero_counts_as_one() -> None:
    manager, _ = make(concurrent=0, batch=0, eta=0)
    assert manager.get_capacity() == 1


@pytest.mark.parametrize("version", [1, 5, 50])
def test_a_recovered_run_has_the_budget_of_a_fresh_one(version: int) -> None:
    manager, served = make(batch=16, eta=2)
    served.version = version
    manager.on_version_recovered(version)
    assert manager.get_capacity() == manager.get_pending_limit() == 48


def test_rejected_rollouts_do_not_use_up_the_budget() -> None:
    manager, _ = make(batch=4, eta=0)
    run(manager, rejected=100)
    assert manager.get_capacity() == 4


def test_a_smaller_batch_does_not_inflate_the_budget_once_rebased() -> None:
    manager, served = make(batch=4, eta=0)
    run(manager, accepted=4)
    served.version = 1
    manager.rebase(num_outstanding=2)
    assert manager.get_capacity() == 2


@pytest.mark.parametrize("end", ["on_rollout_submitted", "on_rollout_accepted", "on_rollout_rejected"])
def test_nothing_can_end_that_has_not_begun(end: str) -> None:
    manager, _ = make()
    with pytest.raises(ValueError, match="none is"):
        getattr(manager, end)()
    assert manager.get_stats() == make()[0].get_stats()


class Budget(RuleBasedStateMachine):
    """A controller that starts only while there is capacity, commits batches of any size, loses and recovers groups."""

    @initialize(
        concurrent=st.integers(1, 12), batch=st.integers(1, 5), eta=st.integers(0, 4), version=st.integers(0, 100)
    )
    def begin(self, concurrent: int, batch: int, eta: int, version: int) -> None:
        self.manager, self.served = make(concurrent, batch, eta, version)
        self.manager.on_version_recovered(version)
        self.enqueued = self.running = self.held = self.unserved = 0

    @rule(count=st.integers(1, 5))
    def enqueue(self, count: int) -> None:
        for _ in range(count):
            self.manager.on_rollout_enqueued()
        self.enqueued += count

    @precondition(lambda self: self.enqueued and self.manager.get_capacity() > 0)
    @rule()
    def start(self) -> None:
        self.manager.on_rollout_submitted()
        self.enqueued -= 1
        self.running += 1

    @precondition(lambda self: self.running)
    @rule(is_accepted=st.booleans())
    def end(self, is_accepted: bool) -> None:
        self.running -= 1
        if is_accepted:
            self.manager.on_rollout_accepted()
            self.held += 1
        else:
            self.manager.on_rollout_rejected()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.held -= data.draw(st.integers(1, self.held))
        self.manager.rebase(self.running + self.held)

    @rule(data=st.data())
    def serve_the_next_version(self, data: st.DataObject) -> None:
        """Whatever number of groups the step took."""
        self.held -= data.draw(st.integers(0, min(self.held, self.manager.consumer_batch_size)))
        self.served.version += 1
        self.manager.rebase(self.running + self.held)

    @invariant()
    def the_budget_counts_what_is_out(self) -> None:
        if not hasattr(self, "manager"):
            return
        out = self.running + self.held
        limit = (self.manager.max_staleness + 1) * self.manager.consumer_batch_size
        assert out <= limit
        assert self.manager.num_outstanding == out
        assert self.manager.get_capacity() == min(self.manager.max_concurrent_rollouts - self.running, limit - out)
        stats = self.manager.get_stats()
        assert (stats.enqueued, stats.running) == (self.enqueued, self.running)


TestBudget = Budget.TestCase
TestBudget.settings = settings(max_examples=60, stateful_step_count=40)
