"""Every task is in one state, every attempt ends in one reason, nothing is lost, whatever happens in which order."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from headway.core.ledger import MAX_ATTEMPTS, Failure, Ledger, TaskState
from headway.core.trajectory import Outcome

FAILURES = [outcome for outcome in Outcome if outcome not in (Outcome.ACCEPTED, Outcome.REJECTED, Outcome.STALE)]


class Account(RuleBasedStateMachine):
    """Drives a ledger through every legal transition, beside a plain dictionary of states."""

    pending, running, saving, ready = (Bundle(name) for name in ("pending", "running", "saving", "ready"))

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger()
        self.model: dict[str, TaskState] = {}
        self.attempts: Counter[str] = Counter()
        self.leased: dict[int, tuple[str, ...]] = {}
        self.handed_out: dict[int, int] = {}
        self.step = self.served = 0

    @rule(target=pending, row=st.integers(0, 40))
    def submit(self, row: int) -> object:
        name = f"0/{row}"
        is_new = self.ledger.submit(name) if self.model.get(name) not in ENDED else False
        assert is_new == (name not in self.model)
        if not is_new:
            return multiple()
        self.model[name] = TaskState.PENDING
        return name

    @rule(target=running, name=consumes(pending))
    def start(self, name: str) -> str:
        self.attempts[name] += 1
        assert self.ledger.start(name) == self.attempts[name]
        self.model[name] = TaskState.RUNNING
        return name

    @rule(target=saving, name=consumes(running), age=st.integers(0, 2))
    def save(self, name: str, age: int) -> str:
        self.ledger.save(name, {max(0, self.step - age): 4, self.step: 3})
        self.model[name] = TaskState.SAVING
        return name

    @rule(target=ready, name=consumes(saving))
    def is_saved(self, name: str) -> str:
        self.ledger.ready(name)
        self.model[name] = TaskState.READY
        return name

    @rule(name=consumes(running))
    def reject(self, name: str) -> None:
        self.ledger.reject(name, "the filter said no")
        self.model[name] = TaskState.REJECTED

    @rule(target=pending, name=consumes(running), outcome=st.sampled_from(FAILURES))
    def fail(self, name: str, outcome: Outcome) -> object:
        return self._queued_again(name, outcome)

    @rule(target=pending, name=consumes(ready))
    def goes_stale(self, name: str) -> object:
        return self._queued_again(name, Outcome.STALE) if self.model[name] is TaskState.READY else multiple()

    def _queued_again(self, name: str, outcome: Outcome) -> object:
        is_queued = self.ledger.fail(name, outcome, "why")
        assert is_queued == (self.attempts[name] < MAX_ATTEMPTS)
        self.model[name] = TaskState.PENDING if is_queued else TaskState.QUARANTINED
        if not is_queued:
            assert [failure.attempt for failure in self.ledger.quarantined[name]] == [1, 2, 3]
        return name if is_queued else multiple()

    @rule(count=st.integers(0, 4))
    def lease(self, count: int) -> None:
        names = tuple(name for name, state in self.model.items() if state is TaskState.READY)[:count]
        self.ledger.lease(self.step, names)
        self.leased[self.step] = names
        self.handed_out[self.step] = len(names)
        self.model |= dict.fromkeys(names, TaskState.LEASED)
        self.step += 1

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), is_skip=st.booleans())
    def commit(self, data: st.DataObject, is_skip: bool) -> None:
        step = data.draw(st.sampled_from(sorted(self.leased)))
        if is_skip:
            self.ledger.skip(step)
            del self.handed_out[step]
        else:
            assert self.ledger.commit(step)
            assert not self.ledger.commit(step)
        self.model |= dict.fromkeys(self.leased.pop(step), TaskState.CONSUMED)

    @rule(step=st.integers(0, 10))
    def forget(self, step: int) -> None:
        self.ledger.forget_before(step)
        assert all(batch.step >= step or not batch.is_committed for batch in self.ledger.batches.values())

    @rule(step=st.integers(0, 10))
    def serve(self, step: int) -> None:
        self.served = max(self.served, step)
        self.ledger.serve(step)

    @invariant()
    def the_account_is_true(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        assert Counter(self.model.values()) == +self.ledger.counts
        assert self.ledger.num_submitted == len(self.model)
        out = sum(state in (TaskState.RUNNING, TaskState.SAVING, TaskState.READY) for state in self.model.values())
        unserved = sum(count for step, count in self.handed_out.items() if step >= self.served)
        assert self.ledger.num_outstanding == out + unserved


ENDED = (TaskState.CONSUMED, TaskState.REJECTED, TaskState.QUARANTINED)
TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=60)


def ready_ledger(count: int) -> Ledger:
    ledger = Ledger()
    for row in range(count):
        ledger.restore_ready(f"0/{row}", attempt=1, versions={0: 1}, started_at=0)
    return ledger


def test_a_batch_is_outstanding_until_its_version_is_served_even_when_committed_and_forgotten() -> None:
    ledger = ready_ledger(5)
    ledger.serve(7)
    ledger.lease(7, ["0/0", "0/1"])
    ledger.commit(7)
    ledger.forget_before(8)
    assert ledger.num_outstanding == 5
    ledger.serve(8)
    assert ledger.num_outstanding == 3


def test_a_skipped_batch_is_outstanding_no_more() -> None:
    ledger = ready_ledger(5)
    ledger.lease(7, ["0/0", "0/1"])
    ledger.skip(7)
    assert ledger.num_outstanding == 3
    assert ledger.next_step == 7


def test_a_group_is_handed_out_once() -> None:
    ledger = ready_ledger(2)
    ledger.lease(0, ["0/0"])
    with pytest.raises(ValueError, match="it is leased"):
        ledger.lease(1, ["0/0"])
    with pytest.raises(ValueError, match="has a batch"):
        ledger.lease(0, ["0/1"])


def test_a_task_that_failed_before_a_restart_has_fewer_attempts_left() -> None:
    ledger = Ledger()
    ledger.submit("0/0")
    ledger.restore_failure(Failure("0/0", 2, Outcome.WORKFLOW_ERROR, "it killed the process"))
    ledger.start("0/0")
    assert not ledger.fail("0/0", Outcome.WORKFLOW_ERROR)
    assert len(ledger.quarantined["0/0"]) == 2


def test_examples_of_failures_are_bounded_and_short() -> None:
    ledger = Ledger(max_attempts=10**6)
    ledger.submit("0/0")
    for number in range(100):
        ledger.start("0/0")
        ledger.fail("0/0", Outcome.REWARD_ERROR, f"{number} " * 1000)
    examples = ledger.examples[Outcome.REWARD_ERROR]
    assert [failure.attempt for failure in examples] == [96, 97, 98, 99, 100]
    assert all(len(failure.message) <= 300 for failure in examples)
