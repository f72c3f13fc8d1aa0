"""What the engine knows of each request, and of each slot of the cache, as arrays.

A running request occupies one slot; the bookkeeping of a decode step is a few array operations over all slots.

    tokens   [slot]  p p p p p g g g . . .        p: prompt   g: generated
    start            --------->|                  first generated position
    length           ----------------->|          tokens known
    computed         --------------->|            tokens that are in the cache: length - 1 when decoding
    limit            ----------------------->|    where max_new_tokens ends it
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.inference.adapters import Adapter
from services.inference.parameters import SamplingParams

ROW = np.dtype(
    [
        ("start", np.int64),
        ("length", np.int64),
        ("computed", np.int64),
        ("limit", np.int64),
        ("epoch", np.int64),  # which weights computed it; see SlotTable.forget
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("is_special", np.bool_),  # has penalties, biases or a minimum length
        ("is_watched", np.bool_),  # streams or has stop strings: looked at after each token
    ],
    align=True,
)
COPIED = ("top_k", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
NO_TOKEN = -1
STOP_IDS_PER_SLOT = 4
INITIAL_CAPACITY = 64

Rows = Any
"""A numpy array of ROW."""
Finish = dict[str, Any]
"""SGLang's `finish_reason`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request has so far; `finish` is None while it runs."""

    output_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int]]
    """(weight version, index of the first output token that it made)."""
    finish: Finish | None
    cached_tokens: int
    num_retractions: int


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. Only the engine's thread changes it."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end it."""
    all_stop_ids: frozenset[int]
    """Tokens that may not come before `min_new_tokens`, also when `ignore_eos` lets them not end it."""
    seed: int
    """64 bits, unsigned."""
    stream: bool
    deliver: Callable[[Progress], None]
    """Called in the event loop: at the end, and while it runs if `stream`."""
    adapter: Adapter | None = None
    """None: the model as it is."""
    output_ids: list[int] = field(default_factory=list)
    """What was generated before it last left its slot."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    slot: int = -1
    sent: int = 0
    """Output tokens that the client has been told of."""
    cached_tokens: int = 0
    num_retractions: int = 0
    is_aborted: bool = False
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def reserved_tokens(self) -> int:
        """The longest it may become."""
        return len(self.prompt) + self.params.max_new_tokens

    def note_version(self, label: str, position: int) -> None:
        """The next output token, number `position`, is made by the weights called `label`."""
        if self.spans and self.spans[-1][1] == position:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != label:
            self.spans.append((label, position))


class SlotTable:
    """The arrays. Slots 0..num_running - 1 run; the others may hold a prefix worth reusing."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_running = 0
        self._num_epochs = 0
        self._epochs: dict[Adapter | None, int] = {}
        """Number of what computes prefixes now: the present weights with an adapter, or without."""
        self.rows: Rows = np.zeros(num_slots, dtype=ROW)
        self.rows["epoch"] = NO_TOKEN
        self.tokens: NDArray[np.int64] = np.full((num_slots, INITIAL_CAPACITY), NO_TOKEN, dtype=np.int64)
        self.logprobs: NDArray[np.float32] = np.zeros((num_slots, INITIAL_CAPACITY), dtype=np.float32)
        self.stops: NDArray[np.int64] = np.full((num_slots, STOP_IDS_PER_SLOT), NO_TOKEN, dtype=np.int64)
        self._requests: list[Request | None] = [None] * num_slots

    def request(self, slot: int) -> Request:
        """The request that runs in a slot."""
        request = self._requests[slot]
        if request is None:
            raise LookupError(f"slot {slot} is idle")
        return request

    def running(self) -> list[Request]:
        return [self.request(slot) for slot in range(self.num_running)]

    def enter(self, request: Request, computed: int) -> int:
        """Give a request the next slot, of which the first `computed` tokens are (to be) in the cache."""
        slot, self.num_running = self.num_running, self.num_running + 1
        start, length = len(request.prompt), len(request.prompt) + len(request.output_ids)
        self._reserve(request.reserved_tokens, len(request.stop_ids))
        self.tokens[slot, :start] = request.prompt
        self.tokens[slot, start:length] = request.output_ids
        self.tokens[slot, length:] = NO_TOKEN
        self.logprobs[slot, start:length] = request.logprobs
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(request.stop_ids)] = list(request.stop_ids)
        row, params = self.rows[slot], request.params
        row["start"], row["length"], row["computed"] = start, length, computed
        row["epoch"] = self._epoch(request.adapter)
        row["limit"], row["seed"] = request.reserved_tokens, request.seed
        for name in COPIED:
            row[name] = getattr(params, name)
        row["is_special"] = _is_special(params)
        row["is_watched"] = request.stream or bool(params.stop)
        self._requests[slot], request.slot = request, slot
        return slot

    def append(self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Add one token [n] to each of the slots [n]; all that came before is computed."""
        lengths = self.rows["length"][slots]
        self.tokens[slots, lengths] = tokens
        self.logprobs[slots, lengths] = logprobs
        self.rows["computed"][slots] = lengths
        self.rows["length"][slots] = lengths + 1

    def output(self, slot: int) -> tuple[list[int], list[float]]:
        """Token ids and log-probabilities that a running slot has generated."""
        start, length = int(self.rows["start"][slot]), int(self.rows["length"][slot])
        return self.tokens[slot, start:length].tolist(), self.logprobs[slot, start:length].tolist()

    def leave(self, slots: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take requests out, and close the gaps: the last running slots change places with the freed ones.

        Returns:
            Slots (a, b) whose contents must be exchanged in the cache, too.
        """
        for slot in slots:
            self.request(slot).slot = -1
            self._requests[slot] = None
        remaining = self.num_running - len(slots)
        holes = np.array([slot for slot in slots if slot < remaining], dtype=np.int64)
        movers = np.array(
            [slot for slot in range(remaining, self.num_running) if self._requests[slot] is not None], dtype=np.int64
        )
        self.num_running = remaining
        both, crossed = np.concatenate([holes, movers]), np.concatenate([movers, holes])
        for array in (self.rows, self.tokens, self.logprobs, self.stops):
            array[both] = array[crossed]
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            moved = self.request(mover)
            self._requests[hole], self._requests[mover], moved.slot = moved, None, hole
        return holes, movers

    def forget(self) -> None:
        """From now on no prefix that was computed before may be reused."""
        self._epochs.clear()

    def forget_adapter(self, adapter: Adapter) -> None:
        self._epochs.pop(adapter, None)

    def _epoch(self, adapter: Adapter | None) -> int:
        if adapter not in self._epochs:
            self._epochs[adapter] = self._num_epochs
            self._num_epochs += 1
        return self._epochs[adapter]

    def prefixes(self, tokens: NDArray[np.int64], adapter: Adapter | None = None) -> tuple[int, int, int]:
        """Which slot holds the longest beginning of `tokens`, computed with the adapter.

        Returns:
            The slot, how many tokens of it are in the cache, and how many a running slot will have in the cache soon.
        """
        width = min(len(tokens), self.tokens.shape[1])
        differs = self.tokens[:, :width] != tokens[:width]
        agreeing = np.where(differs.any(1), differs.argmax(1), width)
        agreeing[self.rows["epoch"] != self._epoch(adapter)] = 0
        usable = np.minimum(agreeing, self.rows["computed"])
        best = int(usable.argmax())
        promised = int(agreeing[: self.num_running].max()) if self.num_running else 0
        return best, int(usable[best]), promised

    def _reserve(self, length: int, num_stops: int) -> None:
        if length > self.tokens.shape[1]:
            extra = max(length, 2 * self.tokens.shape[1]) - self.tokens.shape[1]
            self.tokens = np.pad(self.tokens, ((0, 0), (0, extra)), constant_values=NO_TOKEN)
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, extra)))
        if num_stops > self.stops.shape[1]:
            extra = num_stops - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, extra)), constant_values=NO_TOKEN)


def _is_special(params: SamplingParams) -> bool:
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_new_tokens
        or params.logit_bias
    )
