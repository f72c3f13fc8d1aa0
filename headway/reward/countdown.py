"""Countdown: reach a target with given numbers, each used once, and + - * /. Exact arithmetic, nothing is evaluated."""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from headway.reward.registry import reward_function

MAX_CHARS = 400
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SYMBOLS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class NotArithmetic(ValueError):
    """The text is no arithmetic of whole numbers."""


@reward_function(is_pure=True, typical_s=1e-4)
def countdown(completion: str, **data: Any) -> bool:
    """The last stated expression uses each of `nums` exactly once and its value is `target`."""
    numbers = next(data[column] for column in ("nums", "numbers") if column in data)
    target = data["target"] if "target" in data else data["answer"]
    try:
        value, used = evaluated(stated_expression(completion))
    except NotArithmetic:
        return False
    return Counter(used) == Counter(map(int, numbers)) and value == Fraction(str(target))


def stated_expression(completion: str) -> str:
    """What stands in the last <answer>, in the last box, or else in the last line; without what follows `=`."""
    tagged = TAGGED.findall(completion)
    boxed = completion.rpartition("\\boxed{")
    if tagged:
        text = str(tagged[-1])
    elif boxed[1]:
        text = boxed[2].rpartition("}")[0]
    else:
        lines = completion.strip().splitlines()
        text = lines[-1].rpartition(":")[2] if lines else ""
    for command, sign in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", "")):
        text = text.replace(command, sign)
    return text.translate(SYMBOLS).partition("=")[0].strip().strip("$` .")


def evaluated(expression: str) -> tuple[Fraction, Sequence[int]]:
    """The value of an expression, and the numbers that it uses.

    Raises:
        NotArithmetic: It is anything but + - * / ( ) and whole numbers, too long, or divides by zero.

    Example:
        >>> evaluated("(3 + 5) / 2")
        (Fraction(4, 1), [2, 3, 5])
    """
    if (
        len(expression) > MAX_CHARS
        or not re.fullmatch(r"[\d\s()+\-*/]+", expression)
        or "**" in expression
        or "//" in expression
    ):
        raise NotArithmetic(expression[:80])
    try:
        tree = ast.parse(expression, mode="eval").body
        return _value(tree), [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]  # type: ignore[misc]
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise NotArithmetic(str(error)) from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left) + _value(node.right)
        case ast.BinOp(op=ast.Sub()):
            return _value(node.left) - _value(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _value(node.left) * _value(node.right)
        case ast.BinOp(op=ast.Div()):
            return _value(node.left) / _value(node.right)
    raise NotArithmetic(type(node).__name__)
