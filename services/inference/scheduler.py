"""Decide which requests run in the next forward pass.

    add -> waiting -> [admit] -> running slots -> finished
              ^          copies a prefix that another slot has      |
              +------------- retract (pause) -----------------------+

Every pass decodes all running requests and computes a bounded number of prompt tokens, so neither waits for the other.
A request whose prompt another one is computing right now waits for it and then copies: a group of n samples costs one
prompt.

Guarantee: what all running requests may grow to fits the memory of the cache, so nothing is ever evicted.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.inference.kv_cache import SlotCache
from services.inference.rows import Request, SlotTable

WORTH_WAITING_FOR = 8
"""Tokens of a prompt that another request is about to compute, for which a request waits one step."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: the next `counts[i]` tokens of each of the slots."""

    slots: NDArray[np.int64]
    counts: NDArray[np.int64]


class Scheduler:
    """Owns the waiting queue and the slots."""

    def __init__(self, table: SlotTable, cache: SlotCache, max_tokens: int, prefill_tokens: int) -> None:
        self.table = table
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens

    @property
    def num_running(self) -> int:
        return self.table.num_running

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self, label: str) -> None:
        """Give slots to waiting requests; `label` is the version of the weights that go on with them."""
        copies: dict[int, tuple[int, int]] = {}
        kept: deque[Request] = deque()
        while self.waiting and self.num_running < self.table.num_slots and self._has_room(self.waiting[0]):
            request = self.waiting.popleft()
            if not self._try_enter(request, copies):
                kept.append(request)
                continue
            request.note_version(label, len(request.output_ids))
        self.waiting.extendleft(reversed(kept))
        if copies:
            targets = np.array(list(copies), dtype=np.int64)
            sources = np.array([source for source, _ in copies.values()], dtype=np.int64)
            self.cache.copy(sources, targets, max(length for _, length in copies.values()))

    def next_batch(self) -> Batch | None:
        """One token of every slot that decodes, then a bounded number of prompt tokens, oldest slots first."""
        if not self.num_running:
            return None
        rows = self.table.rows[: self.num_running]
        pending = rows["length"] - rows["computed"]
        if pending.max() == 1:
            return Batch(np.arange(self.num_running), pending)
        slots = np.argsort(pending > 1, kind="stable")
        counts = pending[slots]
        is_prompt = counts > 1
        before = np.cumsum(counts * is_prompt) - counts
        counts = np.where(is_prompt, np.clip(self._prefill_tokens - before, 0, counts), counts)
        return Batch(slots[counts > 0], counts[counts > 0])

    def leave(self, slots: list[int]) -> None:
        """Take requests out of their slots."""
        holes, movers = self.table.leave(slots)
        if len(holes):
            length = int(self.table.rows["computed"][np.concatenate([holes, movers])].max())
            self.cache.copy(np.concatenate([movers, holes]), np.concatenate([holes, movers]), length)

    def retract(self) -> None:
        """Put all running requests back into the queue, before those that never ran, with what they have."""
        requests = sorted(self.table.running(), key=lambda request: request.arrived_s)
        for request in requests:
            request.output_ids, request.logprobs = self.table.output(request.slot)
            request.num_retractions += 1
        self.leave(list(range(self.num_running)))
        self.waiting.extendleft(reversed(requests))

    def withdraw(self, matches: Callable[[Request], bool]) -> list[Request]:
        """Take waiting requests out of the queue."""
        out = [request for request in self.waiting if matches(request)]
        if out:
            self.waiting = deque(request for request in self.waiting if not matches(request))
        return out

    def _has_room(self, request: Request) -> bool:
        longest = max(request.reserved_tokens, int(self.table.rows["limit"][: self.num_running].max(initial=0)))
        return self.num_running == 0 or (self.num_running + 1) * longest <= self._max_tokens

    def _try_enter(self, request: Request, copies: dict[int, tuple[int, int]]) -> bool:
        tokens = np.array(request.prompt + request.output_ids, dtype=np.int64)
        source, usable, promised = self.table.prefixes(tokens, request.adapter)
        if promised >= usable + WORTH_WAITING_FOR and usable < len(tokens) - 1:
            return False
        computed = min(usable, len(tokens) - 1)
        slot = self.table.enter(request, computed)
        request.cached_tokens = min(computed, len(request.prompt))
        if computed and source != slot:
            original = copies[source][0] if source in copies else source
            copies[slot] = (original, computed)
        return True
