"""The program inside the sandbox: limit yourself, load model-written code, and run it or answer calls of it.

    candidate.py MEMORY CPU FILE program SOURCE STARTED      run the code as a program: its stdin and stdout are ours
    candidate.py MEMORY CPU FILE serve SOURCE STARTED        load the code, then answer requests on stdin/stdout

SOURCE and STARTED are inherited descriptors: the code is read from the one, and one byte is written to the other before
the code is touched, so that a sandbox that does not start is told from code that fails.

Nothing here can be trusted by the other side, because the code that it runs may overwrite it. So it answers with plain
values only, written as Python literals, and every judgement is made outside.

    request    length u32 | a Python expression over `call`, `get`, `item`, `length`, `values`, `names`, `ref`
    answer     length u32 | "v" literal | "o" handle and type of something that is no plain value | "e" error

It imports next to nothing, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_MESSAGE_CHARS = 500


def limit(memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    """Limit this process for good."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def encode(value: Any) -> str:
    """The value as a literal; an instance of a subclass counts as what it derives from.

    Raises:
        TypeError: It is no plain value.
    """
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    if isinstance(value, list):
        return f"[{_listed(list.__iter__(value))}]"
    if isinstance(value, tuple):
        return f"({_listed(tuple.__iter__(value))})"
    if isinstance(value, set):
        return f"set([{_listed(set.__iter__(value))}])"
    if isinstance(value, frozenset):
        return f"frozenset([{_listed(frozenset.__iter__(value))}])"
    if isinstance(value, dict):
        return "{" + "".join(f"{encode(key)}:{encode(item)}," for key, item in dict.items(value)) + "}"
    if isinstance(value, range):
        return f"range({value.start},{value.stop},{value.step})"
    kind = type(value).__name__
    if kind == "deque":
        return f"deque([{_listed(value)}])"
    if kind in ("Decimal", "Fraction"):
        return f"{kind}({str(value)!r})"
    raise TypeError(kind)


def _listed(values: Iterable[Any]) -> str:
    return "".join(encode(value) + "," for value in values)


def _scalar(value: Any) -> str | None:
    if value is None or value is True or value is False:
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, bytearray):
        return f"bytearray({bytes(value)!r})"
    if isinstance(value, complex):
        return f"complex({float.__repr__(value.real)},{float.__repr__(value.imag)})"
    return None


class Server:
    """Answers requests about the loaded code."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def answer(self, request: str) -> str:
        try:
            value = eval(request, self._vocabulary())
        except BaseException as error:  # noqa: BLE001 - whatever foreign code raises is an answer
            return error_answer(error)
        try:
            return "v" + encode(value)
        except (TypeError, RecursionError):
            self._objects.append(value)
            return f"o({len(self._objects) - 1},{type(value).__name__!r})"

    def _vocabulary(self) -> dict[str, Callable[..., Any] | float]:
        return {
            "call": lambda target, arguments, keywords: self._at(target)(*arguments, **keywords),
            "get": lambda target, name: getattr(self._at(target), name),
            "item": lambda target, key: self._at(target)[key],
            "length": lambda target: len(self._at(target)),
            "values": lambda target: list(self._at(target)),
            "names": lambda: {name: self._module(name) for name in self._names if not name.startswith("__")},
            "ref": self._at,
            "inf": float("inf"),
            "nan": float("nan"),
            "Decimal": lambda text: __import__("decimal").Decimal(text),
            "Fraction": lambda text: __import__("fractions").Fraction(text),
            "deque": lambda items: __import__("collections").deque(items),
        }

    def _at(self, target: int | str) -> Any:
        return self._names[target] if isinstance(target, str) else self._objects[target]

    def _module(self, name: str) -> str:
        """Name of the module that this name stands for; empty: it stands for something else."""
        value = self._names[name]
        return value.__name__ if type(value) is type(sys) else ""


def error_answer(error: BaseException) -> str:
    return f"e({type(error).__name__!r},{str(error)[:MAX_MESSAGE_CHARS]!r})"


def load(source: str, name: str) -> dict[str, Any]:
    """Run the code as a module of this name; its names."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, "<candidate>", "exec"), module.__dict__)
    return module.__dict__


def serve(source: str) -> None:
    """Answer requests on what were stdin and stdout, until the other side is gone."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    server = None
    try:
        server = Server(load(source, "candidate"))
        answer = "v1"
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises is an answer
        answer = error_answer(error)
    while True:
        packed = answer.encode("utf-8", "backslashreplace")
        answers.write(len(packed).to_bytes(4, "big") + packed)
        answers.flush()
        header = requests.read(4)
        if len(header) < 4 or server is None:
            return
        answer = server.answer(requests.read(int.from_bytes(header, "big")).decode())


def main() -> None:
    memory_bytes, cpu_s, file_bytes = map(int, sys.argv[1:4])
    mode, source_at, started_at = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    with os.fdopen(source_at, "rb") as file:
        source = file.read().decode()
    sys.argv[:] = ["candidate.py"]
    sys.set_int_max_str_digits(0)
    limit(memory_bytes, cpu_s, file_bytes)
    os.write(started_at, b"1")
    os.close(started_at)
    if mode == "program":
        load(source, "__main__")
    else:
        serve(source)


if __name__ == "__main__":
    main()
