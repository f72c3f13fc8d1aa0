"""Slots and queue: requests come, grow, are retracted and leave in any order, and nobody's tokens are mixed up."""

from collections import deque
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.inference.parameters import SamplingParams
from services.inference.rows import Request, SlotTable
from services.inference.scheduler import Batch, Scheduler

NUM_SLOTS = 4
MAX_TOKENS = 120
PREFILL_TOKENS = 9
LABEL = "v1.0"


class TokenCache:
    """A cache that keeps, instead of keys and values, which token each position was computed from."""

    def __init__(self) -> None:
        self.content = np.full((NUM_SLOTS, 64), -7)

    def copy(self, sources: Any, targets: Any, length: int) -> None:
        self.content[targets, :length] = self.content[sources, :length]


def request_of(rid: int, prompt: list[int], max_new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(str(rid), prompt, params, frozenset(), frozenset(), rid, False, lambda _: None)


class SlotMachine(RuleBasedStateMachine):
    """The engine's bookkeeping, with a model that computes nothing and samples a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = TokenCache()
        self.table = SlotTable(NUM_SLOTS)
        self.scheduler = Scheduler(self.table, self.cache, MAX_TOKENS, PREFILL_TOKENS)  # type: ignore[arg-type]
        self.expected: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.next_rid = 0
        self.next_token = 1000

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), max_new_tokens=st.integers(1, 12))
    def add(self, prompt: list[int], max_new_tokens: int) -> None:
        request = request_of(self.next_rid, prompt, max_new_tokens)
        self.expected[request.rid], self.prompts[request.rid] = [], prompt
        self.next_rid += 1
        self.scheduler.add([request])

    @rule()
    def step(self) -> None:
        self.scheduler.admit(LABEL)
        batch = self.scheduler.next_batch()
        if batch is None:
            assert not self.scheduler.waiting
            return
        is_complete = self.compute(batch)
        slots = batch.slots[is_complete]
        tokens = np.arange(self.next_token, self.next_token + len(slots))
        self.next_token += len(slots)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            self.expected[self.table.request(slot).rid].append(token)
        self.table.append(slots, tokens, -tokens.astype(np.float32))
        full = [slot for slot in slots.tolist() if self.table.rows["length"][slot] >= self.table.rows["limit"][slot]]
        self.end(full)

    def compute(self, batch: Batch) -> Any:
        """What a forward pass does: each token attends to what the cache holds of its own sequence."""
        rows = self.table.rows
        assert (batch.counts > 0).all()
        is_prompt = rows["length"][batch.slots] - rows["computed"][batch.slots] > 1
        assert (np.diff(is_prompt.astype(int)) >= 0).all(), "slots that decode come first"
        assert batch.counts[is_prompt].sum() <= PREFILL_TOKENS
        for slot, count in zip(batch.slots.tolist(), batch.counts.tolist(), strict=True):
            start = int(rows["computed"][slot])
            assert self.cache.content[slot, :start].tolist() == self.table.tokens[slot, :start].tolist()
            self.cache.content[slot, start : start + count] = self.table.tokens[slot, start : start + count]
        computed = rows["computed"][batch.slots] + batch.counts
        rows["computed"][batch.slots] = computed
        return computed == rows["length"][batch.slots]

    def end(self, slots: list[int]) -> None:
        for slot in slots:
            self.check(slot)
        if slots:
            self.scheduler.leave(slots)

    @precondition(lambda self: self.table.num_running)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        slots = data.draw(st.lists(st.integers(0, self.table.num_running - 1), unique=True))
        self.end(slots)

    @rule()
    def retract(self) -> None:
        before = self.table.running()
        self.scheduler.retract()
        assert self.table.num_running == 0
        assert all(request in self.scheduler.waiting for request in before)
        for request in before:
            assert request.output_ids == self.expected[request.rid]

    @rule()
    def forget(self) -> None:
        self.table.forget()

    @rule(digit=st.sampled_from("0123456789"))
    def withdraw(self, digit: str) -> None:
        gone = self.scheduler.withdraw(lambda request: request.rid.endswith(digit))
        assert not any(request in self.scheduler.waiting for request in gone)

    @invariant()
    def everybody_has_his_own_tokens(self) -> None:
        for slot in range(self.table.num_running):
            self.check(slot)

    @invariant()
    def memory_suffices_for_what_runs_to_grow(self) -> None:
        running = self.table.num_running
        longest = self.table.rows["limit"][:running].max(initial=0)
        assert running <= 1 or running * longest <= MAX_TOKENS

    def check(self, slot: int) -> None:
        request = self.table.request(slot)
        assert request.slot == slot
        output, logprobs = self.table.output(slot)
        assert output == self.expected[request.rid]
        assert logprobs == [-float(token) for token in output]
        start = len(self.prompts[request.rid])
        assert self.table.tokens[slot, :start].tolist() == self.prompts[request.rid]


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlots = SlotMachine.TestCase


def scheduler() -> tuple[Scheduler, TokenCache]:
    cache = TokenCache()
    return Scheduler(SlotTable(NUM_SLOTS), cache, MAX_TOKENS, 64), cache  # type: ignore[arg-type]


def finish_prompt(subject: Scheduler, cache: TokenCache) -> None:
    """Compute what is due of slot 0, and sample its first token."""
    batch = subject.next_batch()
    assert batch is not None
    assert batch.slots.tolist() == [0]
    length = int(subject.table.rows["length"][0])
    cache.content[0, :length] = subject.table.tokens[0, :length]
    subject.table.append(np.array([0]), np.array([99]), np.zeros(1, dtype=np.float32))


def test_a_group_computes_its_prompt_once() -> None:
    subject, cache = scheduler()
    prompt = list(range(20))
    subject.add([request_of(rid, prompt, 4) for rid in range(4)])
    subject.admit(LABEL)
    finish_prompt(subject, cache)
    subject.admit(LABEL)
    batch = subject.next_batch()
    assert batch is not None
    assert (batch.slots.tolist(), batch.counts.tolist()) == ([0, 1, 2, 3], [1, 1, 1, 1])
    assert cache.content[3, :19].tolist() == prompt[:19]


def test_after_new_weights_no_prefix_is_reused() -> None:
    subject, cache = scheduler()
    for forgets, expected in ((False, 8), (True, 0)):
        subject.add([request_of(0, [1] * 9, 1)])
        subject.admit(LABEL)
        finish_prompt(subject, cache)
        subject.leave([0])
        if forgets:
            subject.table.forget()
        subject.add([request_of(1, [1] * 9, 1)])
        subject.admit(LABEL)
        assert subject.table.rows["computed"][0] == expected
        subject.leave([0])
        subject.table.forget()


def test_versions_are_noted_where_they_change() -> None:
    request = request_of(0, [1], 9)
    for label, position in [("a", 0), ("a", 0), ("b", 0), ("b", 3), ("c", 4), ("d", 4), ("c", 6)]:
        request.note_version(label, position)
    assert request.spans == [("b", 0), ("d", 4), ("c", 6)]


def test_retracted_requests_go_on_before_new_ones_and_in_their_order() -> None:
    subject, _ = scheduler()
    subject.add([request_of(rid, [rid], 5) for rid in range(3)])
    subject.admit(LABEL)
    subject.add([request_of(9, [9], 5)])
    subject.retract()
    assert [request.rid for request in subject.waiting] == ["0", "1", "2", "9"]
    assert isinstance(subject.waiting, deque)
