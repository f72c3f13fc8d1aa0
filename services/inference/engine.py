"""The built-in engine: one thread that computes, driven by the event loop.

    event loop                          engine thread
    submit, call  -- inbox -->   handle inbox -> finish aborted -> admit -> forward -> sample -> finish
    deliver       <-- one call_soon_threadsafe a step --------------------------------------------+

Only the engine's thread touches requests, slots and weights, and only between two steps, so nothing is locked.

The thread waits for: something in the inbox, when no request can run or generation is paused.
Unblocked by: submit, call, stop.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.inference.adapters import Adapter
from services.inference.detokenizer import Detokenizer
from services.inference.language_model import LanguageModel, Queries
from services.inference.rows import Finish, Progress, Request, SlotTable
from services.inference.sampler import sample
from services.inference.scheduler import Batch, Scheduler

T = TypeVar("T")
ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: Finish = {"type": "abort", "message": "Abort in waiting queue"}
NOT_FINITE: Finish = {
    "type": "abort",
    "message": "The model's logits are not finite; its weights are broken.",
    "status_code": 500,
    "err_type": "InternalServerError",
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of the engine."""

    max_running_requests: int = 64
    kv_cache_bytes: int = 4 << 30
    """What the sequences that run at once may take."""
    prefill_tokens: int = 1024
    """Prompt tokens in one forward pass."""


@dataclass
class Counters:
    """What has happened since the start, for /metrics."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    steps: int = 0
    weight_updates: int = 0
    weight_load_s: float = 0.0


class Engine:
    """Generates for many requests at once."""

    def __init__(self, model: LanguageModel, detokenizer: Detokenizer, settings: EngineSettings, label: str) -> None:
        self.model = model
        self.detokenizer = detokenizer
        self.settings = settings
        self.counters = Counters()
        self.label = label
        """Version of the weights, as responses report it."""
        self.eos_ids = _eos_ids(model, detokenizer)
        self.is_paused = False
        self.adapters: dict[str, Adapter] = {}
        """Those that requests may name. A request that runs keeps its own, also when it is unloaded."""
        table = SlotTable(settings.max_running_requests)
        max_tokens = settings.kv_cache_bytes // max(1, self._warm_up())
        self.scheduler = Scheduler(table, model.cache, max_tokens, settings.prefill_tokens)
        self._table = table
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._held: list[Request] = []
        self._exclusive: deque[Callable[[], None]] = deque()
        self._outbox: list[tuple[Request, Progress]] = []
        self._is_stopping = False
        self._has_aborted = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None

    # --- from the event loop

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its present step; requests that still run are dropped."""
        self._inbox.put(self._stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def wait(self) -> None:
        """Wait until the thread ends; raises what ended it, if that was an error."""
        if self._ended is not None:
            await asyncio.shield(self._ended)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests; each one's `deliver` is called with its progress."""
        self._inbox.put(lambda: self._accept(requests))

    async def call(self, function: Callable[[], T], when_idle: bool = False) -> T:
        """Run a function in the engine's thread, between two steps.

        Args:
            function: What to run; may use the methods below.
            when_idle: Wait until nothing runs or generation is paused; new requests wait meanwhile.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = function()
            except Exception as error:  # noqa: BLE001 travels to the caller
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_succeed, future, value)

        self._inbox.put((lambda: self._exclusive.append(run)) if when_idle else run)
        return await future

    # --- for functions given to `call`

    def pause(self, mode: str) -> None:
        """Stop generating: `retract` puts what runs back into the queue, `in_place` leaves it, `abort` ends it."""
        if mode == "abort":
            self.abort(lambda request: True)
            self._finish_aborted()
        if mode == "retract":
            self.counters.retracted += self.scheduler.num_running
            self.scheduler.retract()
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def abort(self, matches: Callable[[Request], bool]) -> None:
        """End requests: those waiting at once, those running before the next step."""
        waiting = self.scheduler.withdraw(matches)
        waiting += [request for request in self._held if matches(request)]
        self._held = [request for request in self._held if not matches(request)]
        for request in waiting:
            self.counters.aborted += 1
            self._outbox.append((request, self._progress(request, ABORTED_WAITING)))
        for request in self.scheduler.table.running():
            request.is_aborted = request.is_aborted or matches(request)
            self._has_aborted = self._has_aborted or request.is_aborted

    def flush_cache(self) -> bool:
        """Forget all prefixes; false where requests run, or wait without a pause."""
        if self.scheduler.num_running or (self.scheduler.waiting and not self.is_paused):
            return False
        self._table.forget()
        return True

    def set_label(self, label: str) -> None:
        """Name the weights that make the tokens from now on."""
        self.label = label
        for request in self.scheduler.table.running():
            request.note_version(label, int(self._table.rows["length"][request.slot]) - len(request.prompt))

    def add_adapter(self, adapter: Adapter) -> None:
        self.model.prepare_for_adapters()
        self.adapters[adapter.name] = adapter

    def remove_adapter(self, name: str) -> None:
        self._table.forget_adapter(self.adapters.pop(name))

    def weights_changed(self) -> None:
        """No prefix that the old weights computed may be reused; running requests keep theirs."""
        self.model.weights_changed()
        self._table.forget()
        self.counters.weight_updates += 1

    # --- the thread

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._handle_inbox()
                self._run_exclusive()
                if not self.is_paused:
                    self._step()
                self._send()
        except BaseException as error:  # noqa: BLE001 the supervisor raises it: the process ends
            self._report(error)
        else:
            self._report(None)

    def _handle_inbox(self) -> None:
        is_idle = self.is_paused or not (self.scheduler.num_running or self.scheduler.waiting)
        must_wait = is_idle and not self._exclusive
        try:
            while True:
                self._inbox.get(block=must_wait)()
                must_wait = False
        except queue.Empty:
            pass

    def _stop(self) -> None:
        self._is_stopping = True

    def _accept(self, requests: Sequence[Request]) -> None:
        self.counters.prompt_tokens += sum(len(request.prompt) for request in requests)
        if self._exclusive:
            self._held.extend(requests)
        else:
            self.scheduler.add(requests)

    def _run_exclusive(self) -> None:
        while self._exclusive and (self.is_paused or not (self.scheduler.num_running or self.scheduler.waiting)):
            self._exclusive.popleft()()
        if self._held and not self._exclusive:
            self.scheduler.add(self._held)
            self._held = []

    def _step(self) -> None:
        self._finish_aborted()
        self.scheduler.admit(self.label)
        self._finish_empty()
        batch = self.scheduler.next_batch()
        if batch is None:
            return
        self.counters.steps += 1
        rows = self._table.rows
        computed = rows["computed"][batch.slots] + batch.counts
        is_complete = computed == rows["length"][batch.slots]
        logits = self._forward(batch, is_complete)
        rows["computed"][batch.slots] = computed
        slots = batch.slots[is_complete]
        if len(slots):
            tokens, logprobs = sample(logits, self._table, slots)
            self._take(slots, tokens.numpy(), logprobs.numpy())

    def _forward(self, batch: Batch, is_wanted: NDArray[np.bool_]) -> torch.Tensor:
        """Logits of the last token of each wanted slot."""
        ends = np.cumsum(batch.counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - batch.counts, batch.counts)
        slots = np.repeat(batch.slots, batch.counts)
        positions = self._table.rows["computed"][slots] + offsets
        tokens = self._table.tokens[slots, positions]
        wanted, adapters = ends[is_wanted] - 1, self._adapters_of(batch)
        return self.model.logits(Queries(batch.slots, batch.counts, tokens, positions, wanted, adapters))

    def _adapters_of(self, batch: Batch) -> list[Adapter | None] | None:
        found = [self._table.request(slot).adapter for slot in batch.slots.tolist()]
        return found if any(found) else None

    def _take(self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Add a token to each slot, send what is due, and take out what has ended."""
        table = self._table
        table.append(slots, tokens, logprobs)
        self.counters.generation_tokens += len(slots)
        is_stop = (table.stops[slots] == tokens[:, None]).any(1)
        is_full = table.rows["length"][slots] >= table.rows["limit"][slots]
        is_broken = ~np.isfinite(logprobs)
        finishes: dict[int, Finish] = {}
        for index in np.flatnonzero(is_stop | is_full | is_broken | table.rows["is_watched"][slots]).tolist():
            slot = int(slots[index])
            stop = int(tokens[index]) if is_stop[index] else None
            finish = NOT_FINITE if is_broken[index] else self._finish_of(slot, stop, bool(is_full[index]))
            if finish is not None:
                finishes[slot] = finish
            elif self._is_due(slot):
                self._outbox.append((table.request(slot), self._progress(table.request(slot), None)))
        self._finish(finishes)
        if is_broken.any():
            self.model.cache.wipe(table.num_running)
            table.forget()

    def _finish_of(self, slot: int, stop_token: int | None, is_full: bool) -> Finish | None:
        """SGLang's order: a stop string, then a stop token, then the length."""
        request = self._table.request(slot)
        if request.params.stop and (matched := self._stop_string(slot)) is not None:
            return {"type": "stop", "matched": matched}
        if stop_token is not None:
            return {"type": "stop", "matched": stop_token}
        return {"type": "length", "length": request.params.max_new_tokens} if is_full else None

    def _stop_string(self, slot: int) -> str | None:
        """The stop string that the last token completes, if any."""
        request = self._table.request(slot)
        start, length = int(self._table.rows["start"][slot]), int(self._table.rows["length"][slot])
        longest = max(len(text.encode()) for text in request.params.stop)
        tail = self._table.tokens[slot, max(start, length - longest - 1) : length].tolist()
        text = self.detokenizer.decode(tail, request.params.skip_special_tokens)
        return next((stop for stop in request.params.stop if stop in text), None)

    def _is_due(self, slot: int) -> bool:
        request = self._table.request(slot)
        num_tokens = int(self._table.rows["length"][slot]) - len(request.prompt)
        is_due = request.stream and (request.sent == 0 or num_tokens - request.sent >= request.params.stream_interval)
        if is_due:
            request.sent = num_tokens
        return is_due

    def _finish_aborted(self) -> None:
        if not self._has_aborted:
            return
        self._has_aborted = False
        self._finish({request.slot: ABORTED for request in self.scheduler.table.running() if request.is_aborted})

    def _finish_empty(self) -> None:
        """Requests for no token at all end as soon as they have a slot."""
        rows = self._table.rows[: self._table.num_running]
        empty = np.flatnonzero(rows["length"] >= rows["limit"]).tolist()
        self._finish({slot: {"type": "length", "length": 0} for slot in empty})

    def _finish(self, finishes: dict[int, Finish]) -> None:
        if not finishes:
            return
        for slot, finish in finishes.items():
            request = self._table.request(slot)
            self.counters.finished += 1
            self.counters.aborted += finish["type"] == "abort"
            self.counters.cached_tokens += request.cached_tokens
            self._outbox.append((request, self._progress(request, finish)))
        self.scheduler.leave(list(finishes))

    def _progress(self, request: Request, finish: Finish | None) -> Progress:
        if request.slot >= 0:
            output_ids, logprobs = self._table.output(request.slot)
        else:
            output_ids, logprobs = request.output_ids, request.logprobs
        spans = list(request.spans)
        return Progress(output_ids, logprobs, spans, finish, request.cached_tokens, request.num_retractions)

    def _send(self) -> None:
        if self._outbox and self._loop is not None:
            self._loop.call_soon_threadsafe(_deliver, self._outbox)
            self._outbox = []

    def _report(self, error: BaseException | None) -> None:
        if self._loop is None or self._ended is None:
            return
        if error is None:
            self._loop.call_soon_threadsafe(_succeed, self._ended, None)
        else:
            self._loop.call_soon_threadsafe(_fail, self._ended, error)

    @torch.inference_mode()
    def _warm_up(self) -> int:
        """Run one token, which allocates the cache; returns its bytes per token of a sequence."""
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        self.model.logits(Queries(zero, one, zero, zero, zero))
        return self.model.cache.bytes_per_token()


def _eos_ids(model: LanguageModel, detokenizer: Detokenizer) -> frozenset[int]:
    """Every end-of-sequence token that the model's folder names."""
    generation = getattr(model.model, "generation_config", None)
    named = (model.model.config.eos_token_id, getattr(generation, "eos_token_id", None), detokenizer.eos_token_id)
    ids: set[int] = set()
    for source in named:
        if source is not None:
            ids.update(source if isinstance(source, list) else [source])
    return frozenset(ids)


def _deliver(progress: list[tuple[Request, Progress]]) -> None:
    for request, news in progress:
        request.deliver(news)


def _succeed(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
