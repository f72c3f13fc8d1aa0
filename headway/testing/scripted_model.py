"""A generation engine without a model: requests advance by a script, so that a test knows each token before it comes.

    waiting --slot free--> running --stop, budget, abort--> finished
       ^                      |
       +---- retract ---------+        nothing advances while paused

Guarantee: token `i` of a request is `next_token(request)`, and its log-probability is `logprob_of(version)` of the
version that was loaded when it was made: a test can tell from the log-probs alone which version made a token.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

EOS = 2
VOCABULARY = 512
CONTEXT_LENGTH = 4096


def logprob_of(label: str) -> float:
    """The log-probability of every token that the version makes.

    Example:
        >>> logprob_of("v1.4"), logprob_of("default")
        (-0.05, -9.0)
    """
    step = label.rpartition(".")[2]
    return -(int(step) + 1) / 100 if step.isdigit() else -9.0


class Pause(StrEnum):
    """What holds generation up."""

    NONE = "none"
    RETRACT = "retract"
    """Running requests are back in the queue, the cache is free."""
    IN_PLACE = "in_place"
    """Running requests keep their cache."""
    ABORT = "abort"
    """Everything was ended; new requests wait outside."""


@dataclass(eq=False)
class ScriptedRequest:
    """One request as the engine holds it."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """The text of a request is one character a token: `chr(id)`."""
    ignore_eos: bool = False
    on_progress: Callable[["ScriptedRequest"], None] = lambda request: None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    """[label, start, end] over the output."""
    finish: dict[str, Any] | None = None
    num_retractions: int = 0
    is_running: bool = False

    def append(self, token: int, label: str) -> None:
        """Take one generated token."""
        if not self.spans or self.spans[-1][0] != label:
            self.spans.append([label, len(self.ids), len(self.ids)])
        self.ids.append(token)
        self.logprobs.append(logprob_of(label))
        self.spans[-1][2] = len(self.ids)

    def end(self, finish: dict[str, Any]) -> None:
        if self.finish is None:
            self.finish = finish
            self.on_progress(self)


NextToken = Callable[[ScriptedRequest], int]


def count_up(request: ScriptedRequest) -> int:
    """Tokens 10, 11, 12, ... by position in the whole sequence, never a stop: a continued request goes on counting."""
    return 10 + (len(request.prompt) + len(request.ids)) % 500


class ScriptedModel:
    """Holds requests, advances them, and changes versions."""

    def __init__(self, label: str, next_token: NextToken = count_up, max_running: int = 256) -> None:
        self.label = label
        self.next_token = next_token
        self.max_running = max_running
        self.pause = Pause.NONE
        self.requests: dict[str, ScriptedRequest] = {}
        self.num_generated = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._emptied = asyncio.Event()
        self._arrived = asyncio.Condition()

    async def add(self, requests: Iterable[ScriptedRequest]) -> None:
        """Take requests; while paused by abort they wait outside."""
        if self.pause is Pause.ABORT:
            await self._resumed.wait()
        for request in requests:
            self.requests[request.rid] = request
        async with self._arrived:
            self._arrived.notify_all()

    async def wait_for_requests(self, count: int) -> None:
        """Wait until so many are held: the way for a test to know that they have arrived."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    def advance(self, tokens: int = 1) -> None:
        """Let every running request make so many tokens, or what is left of it."""
        for _ in range(tokens):
            for request in self._running():
                self._one_token(request)

    def finish_all(self) -> None:
        """Advance until every running request has ended by itself."""
        while self._running():
            self.advance()

    def abort(self, rids: Iterable[str]) -> None:
        """End requests early; each keeps what it has."""
        for rid in list(rids):
            request = self.requests.pop(rid, None)
            if request is not None:
                message = "Aborted" if request.is_running else "Abort in waiting queue"
                request.end({"type": "abort", "message": message, "status_code": None, "err_type": None})
        self._note_if_empty()

    def hold(self, mode: Pause) -> None:
        """Pause."""
        self.pause = mode
        self._resumed.clear()
        if mode is Pause.ABORT:
            self.abort(self.requests)
        for request in self.requests.values():
            if mode is Pause.RETRACT and request.is_running:
                request.is_running, request.num_retractions = False, request.num_retractions + 1

    def resume(self) -> None:
        self.pause = Pause.NONE
        self._resumed.set()

    async def wait_until_empty(self) -> None:
        """Wait for all requests to end."""
        while self.requests:
            self._emptied.clear()
            await self._emptied.wait()

    @property
    def is_busy(self) -> bool:
        """Requests hold cache: it cannot be flushed."""
        return bool(self.requests) and self.pause is not Pause.RETRACT

    def _running(self) -> list[ScriptedRequest]:
        if self.pause is not Pause.NONE:
            return []
        running = list(self.requests.values())[: self.max_running]
        for request in running:
            request.is_running = True
        return running

    def _one_token(self, request: ScriptedRequest) -> None:
        token = self.next_token(request)
        request.append(token, self.label)
        self.num_generated += 1
        matched = self._matched(request, token)
        if matched is not None:
            self._finish(request, {"type": "stop", "matched": matched})
        elif len(request.ids) >= request.max_new_tokens:
            self._finish(request, {"type": "length", "length": request.max_new_tokens})
        else:
            request.on_progress(request)

    @staticmethod
    def _matched(request: ScriptedRequest, token: int) -> int | str | None:
        """The stop token or stop string that the newest token completes."""
        if len(request.ids) < request.min_new_tokens:
            return None
        if (token == EOS and not request.ignore_eos) or token in request.stop_token_ids:
            return token
        text = "".join(map(chr, request.ids))
        return next((stop for stop in request.stop if stop in text), None) if request.stop else None

    def _finish(self, request: ScriptedRequest, finish: dict[str, Any]) -> None:
        self.requests.pop(request.rid, None)
        request.end(finish)
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self.requests:
            self._emptied.set()
