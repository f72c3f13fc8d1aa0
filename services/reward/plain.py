"""Plain values that cross the border of the sandbox as text: never by running anything, and never as objects of theirs.

A value is numbers, text, None, and containers of these. What comes out of `decode` was built here, so its equality is
Python's own: a candidate can return a wrong value, and cannot return one that claims to be equal to everything.

Pure.
"""

import ast
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

MAX_DEPTH = 200
NAMES: Mapping[str, Any] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}
BUILDERS: Mapping[str, Callable[..., Any]] = {
    "set": set,
    "frozenset": frozenset,
    "range": range,
    "bytearray": bytearray,
    "complex": complex,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "deque": deque,
}


class NotPlain(ValueError):
    """The text is no plain value."""


def decode(text: str) -> Any:
    """The plain value that a literal stands for.

    Raises:
        NotPlain: It is none; the text may be anything.

    Example:
        >>> decode("[1, (2.5, 'x'), {None: set([1])}]")
        [1, (2.5, 'x'), {None: {1}}]
    """
    try:
        return _value(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, TypeError, InvalidOperation, OverflowError, RecursionError, MemoryError) as error:
        raise NotPlain(f"{type(error).__name__}: {str(error)[:200]}") from error


def _value(node: ast.expr, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deeply")
    match node:
        case ast.Constant() if node.value is not ...:
            return node.value
        case ast.Name() if node.id in NAMES:
            return NAMES[node.id]
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, depth)
        case ast.List():
            return [_value(item, depth + 1) for item in node.elts]
        case ast.Tuple():
            return tuple(_value(item, depth + 1) for item in node.elts)
        case ast.Dict():
            return _dictionary(node, depth)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in BUILDERS:
            return BUILDERS[name](*[_value(argument, depth + 1) for argument in node.args])
    raise NotPlain(f"{type(node).__name__} is no plain value")


def _number(node: ast.expr, depth: int) -> Any:
    value = _value(node, depth + 1)
    if not isinstance(value, (int, float)):
        raise NotPlain("only numbers have a sign")
    return value


def _dictionary(node: ast.Dict, depth: int) -> dict[Any, Any]:
    if any(key is None for key in node.keys):
        raise NotPlain("no unpacking")
    keys = [_value(key, depth + 1) for key in node.keys if key is not None]
    return dict(zip(keys, [_value(value, depth + 1) for value in node.values], strict=True))
