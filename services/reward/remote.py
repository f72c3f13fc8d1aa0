"""The judge's side of a candidate in the sandbox: call its functions, and get plain values back.

What is no plain value stays in the sandbox, and is held here by a handle: it can be called, indexed, iterated, and its
attributes read, all of which ends in plain values. It cannot be compared and has no truth: those would be its own word.
"""

import builtins
import os
import select
from collections.abc import Callable, Iterator
from typing import Any

from services.reward.candidate import encode
from services.reward.plain import NotPlain, decode

MAX_ANSWER_BYTES = 4 * 2**20


class CandidateLost(BaseException):
    """The candidate died, broke the protocol, or is out of time. A test cannot catch it by accident."""


class Opaque(Exception):
    """A test asked for the truth or the equality of something that is no plain value."""


class RemoteError(Exception):
    """The candidate raised an error that is not one of Python's own."""


class Channel:
    """Requests and answers over a pair of descriptors, within the time that remains."""

    def __init__(self, requests: int, answers: int, remaining_s: Callable[[], float]) -> None:
        self._requests, self._answers = requests, answers
        self._remaining_s = remaining_s

    def loaded(self) -> None:
        """Wait until the candidate's code is loaded.

        Raises:
            CandidateLost: It never will be.
            Exception: What the code raised.
        """
        self._understood(self._receive())

    def ask(self, request: str) -> Any:
        """The value of a request.

        Raises:
            CandidateLost: There will be no answer.
            Exception: What the candidate raised.
        """
        packed = request.encode()
        self._send(len(packed).to_bytes(4, "big") + packed)
        return self._understood(self._receive())

    def _understood(self, answer: str) -> Any:
        kind, text = answer[:1], answer[1:]
        try:
            value = decode(text)
            if kind == "v":
                return value
            if kind == "o":
                handle, type_name = value
                return Remote(self, int(handle), str(type_name))
            name, message = value
        except (NotPlain, TypeError, ValueError) as error:
            raise CandidateLost(f"an answer that is none: {error}") from None
        raise _error(str(name), str(message))

    def _send(self, packed: bytes) -> None:
        sent = 0
        try:
            while sent < len(packed):
                self._wait(writing=True)
                sent += os.write(self._requests, packed[sent : sent + select.PIPE_BUF])
        except OSError as error:
            raise CandidateLost("the candidate is gone") from error

    def _receive(self) -> str:
        length = int.from_bytes(self._read(4), "big")
        if length > MAX_ANSWER_BYTES:
            raise CandidateLost(f"an answer of {length} bytes")
        return self._read(length).decode(errors="replace")

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            self._wait(writing=False)
            data = os.read(self._answers, length - len(parts))
            if not data:
                raise CandidateLost("the candidate ended before its tests did")
            parts += data
        return bytes(parts)

    def _wait(self, writing: bool) -> None:
        reading, written = ([], [self._requests]) if writing else ([self._answers], [])
        while (remaining_s := self._remaining_s()) > 0:
            if any(select.select(reading, written, [], remaining_s)):
                return
        raise CandidateLost("out of time")


class Remote:
    """Something of the candidate's that is no plain value: a function, a class, an instance."""

    def __init__(self, channel: Channel, target: int | str, type_name: str) -> None:
        self.__dict__.update(_channel=channel, _target=target, _type_name=type_name)

    def __repr__(self) -> str:
        return f"<{self._type_name} of the candidate>"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        named = "{" + ",".join(f"{name!r}:{expression(value)}" for name, value in keywords.items()) + "}"
        listed = "[" + ",".join(map(expression, arguments)) + "]"
        return self._channel.ask(f"call({self._target!r},{listed},{named})")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask(f"get({self._target!r},{name!r})")

    def __getitem__(self, key: Any) -> Any:
        return self._channel.ask(f"item({self._target!r},{expression(key)})")

    def __len__(self) -> int:
        return int(self._channel.ask(f"length({self._target!r})"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._channel.ask(f"values({self._target!r})"))

    def __eq__(self, other: object) -> bool:
        raise Opaque(f"{self!r} cannot be compared")

    def __bool__(self) -> bool:
        raise Opaque(f"{self!r} has no truth")

    __hash__ = None  # type: ignore[assignment]


def expression(value: Any) -> str:
    """The value as the candidate can read it.

    Raises:
        Opaque: It is neither a plain value nor something of the candidate's.
    """
    if isinstance(value, Remote):
        return f"ref({value._target!r})"
    if isinstance(value, (list, tuple)) and any(isinstance(item, Remote) for item in value):
        items = ",".join(map(expression, value))
        return f"[{items}]" if isinstance(value, list) else f"({items},)"
    try:
        return encode(value)
    except TypeError as error:
        raise Opaque(f"a {error} cannot be given to the candidate") from None


def _error(name: str, message: str) -> Exception:
    """One of Python's own errors where the name is one, so that a test may expect it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # some need other arguments, e.g. UnicodeDecodeError
            return RemoteError(f"{name}: {message}")
    return RemoteError(f"{name}: {message}")
