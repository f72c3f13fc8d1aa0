"""A piece of a request: what one server was asked for, and what has come back so far.

A sample is made of one or more pieces: one while nothing interrupts it, one more after each abort, lost server or move.

The versions of a piece's tokens are those that the server reports: the spans of its last event. When the connection is
lost before that, an event's own label counts, for as long as it is the label that the server was verified to serve when
the piece was sent; tokens that came later are given up. Nothing is ever stamped with what the client believes the
version to be.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.core.evidence import Contradiction, Span


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a piece. Hashable: requests of equal sampling travel together."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a server ended a piece."""

    kind: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    """The stop string or token id that was met."""


@dataclass(frozen=True, slots=True)
class Update:
    """One event of a stream."""

    index: int
    """Which piece of the call."""
    ids: Sequence[int]
    logprobs: Sequence[float]
    total: int | None = None
    """Tokens of the piece so far, which tells a cumulative from an incremental stream; None: it is incremental."""
    label: str | None = None
    """The version that the server served when it sent the event."""
    spans: list[Span] | None = None
    finish: Finish | None = None
    error: tuple[int, str] | None = None
    """HTTP-like status and message, sent in place of tokens."""


class Piece:
    """What one server was asked for, and what has come back so far."""

    __slots__ = (
        "_is_broken",
        "_label",
        "ended",
        "finish",
        "ids",
        "input_ids",
        "logprobs",
        "rid",
        "sampling",
        "span",
        "spans",
        "trusted",
    )

    def __init__(self, rid: str, input_ids: list[int], sampling: Sampling, label: str) -> None:
        """`label` is what the server was verified to serve."""
        self.rid = rid
        self.input_ids = input_ids
        self.sampling = sampling
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] | None = None
        self.finish: Finish | None = None
        self.span: Any = None
        """Whose work it is, for traces."""
        self.trusted = 0
        """Leading tokens whose version the server has stated."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._label = label
        self._is_broken = False

    @property
    def label(self) -> str:
        """The version that the server was verified to serve when the piece was made."""
        return self._label

    def apply(self, update: Update) -> None:
        """Take one event.

        Raises:
            Contradiction: Its counts fit neither a cumulative nor an incremental stream.
        """
        have, count = len(self.ids), len(update.logprobs)
        if update.total is not None and update.total == count:
            self.ids, self.logprobs = list(update.ids), list(update.logprobs)
        elif update.total is None or update.total == have + count:
            self.ids += update.ids
            self.logprobs += update.logprobs
        else:
            raise Contradiction(f"an event brings {count} tokens to {have}, but says that there are {update.total}")
        self._attribute(update)
        self.finish = update.finish
        if self.finish is not None and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def salvage(self) -> None:
        """After a broken connection: keep the tokens whose version is known, as if the server had aborted the piece."""
        if self.finish is None:
            del self.ids[self.trusted :], self.logprobs[self.trusted :]
            self.spans = [Span(self._label, 0, self.trusted)] if self.trusted else []
            self.finish = Finish("abort")

    def _attribute(self, update: Update) -> None:
        if update.spans is not None:
            self.spans, self.trusted = update.spans, len(self.ids)
            return
        self._is_broken = self._is_broken or update.label != self._label
        if not self._is_broken:
            self.trusted = len(self.ids)
            if update.finish is not None:
                self.spans = [Span(self._label, 0, self.trusted)]
