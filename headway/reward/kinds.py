"""What kind of thing an answer is, and its parts. Two answers of different kinds never mean the same. Pure."""

import re
from dataclasses import dataclass
from enum import Enum, auto

WORDS = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{2,}")
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "mod", "inf", "frac"}
)
INEQUALITY = re.compile(r"<|>|\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|≠")
OPENING, CLOSING = "([{", ")]}"
OR = re.compile(r"\s*,?\s*\b(?:or|and)\b\s*")
BOUND = r"(-?[^<>=a-z\\]+|-?\\infty|-?\\pi|-?\\frac\{-?\d+\}\{\d+\}|-?\d*\\sqrt\{\d+\})"
ONE_SIDED = re.compile(rf"[a-zA-Z]\s*(<|>|\\le|\\ge)\s*{BOUND}")
TWO_SIDED = re.compile(rf"{BOUND}\s*(<|\\le)\s*[a-zA-Z]\s*(<|\\le)\s*{BOUND}")


class Kind(Enum):
    COLLECTION = auto()
    """A set, a list of solutions, `a \\pm b`: the order has no meaning."""
    UNION = auto()
    SEQUENCE = auto()
    """A tuple or an interval: order and brackets have a meaning."""
    RELATION = auto()
    """An equation or an inequality."""
    TEXT = auto()
    """Words, or a letter in parentheses."""
    EXPRESSION = auto()


@dataclass(frozen=True, slots=True)
class Parts:
    """An answer taken apart."""

    parts: list[str]
    brackets: str = ""
    """Both of them, where they have a meaning."""


def kind_of(text: str) -> Kind:
    """The kind of an answer in normal spelling.

    Example:
        >>> [kind_of(text).name for text in ("(1,2]", "1, 2", "x<3", "(x-1)(x+2)", "yes", "y^2=x")]
        ['SEQUENCE', 'COLLECTION', 'SEQUENCE', 'EXPRESSION', 'TEXT', 'RELATION']
    """
    if "\\cup" in text:
        return Kind.UNION
    if _interval_of(text) or (_is_enclosed(text) and len(split(text[1:-1])) > 1):
        return Kind.SEQUENCE
    plain = OR.sub(",", text)
    if text.startswith("\\{") or text == "\\emptyset" or "\\pm" in text or len(split(plain)) > 1:
        return Kind.COLLECTION
    if INEQUALITY.search(text) or "=" in text:
        return Kind.RELATION
    if re.fullmatch(r"\(?[A-Za-z]\)?", text) and text.strip("()").isupper():
        return Kind.TEXT
    words = [word for word in WORDS.findall(text) if word not in FUNCTIONS]
    return Kind.TEXT if words and "\\begin" not in text else Kind.EXPRESSION


def parts_of(kind: Kind, text: str) -> Parts:
    """The parts of a collection, a union or a sequence."""
    if kind is Kind.UNION:
        return Parts([part.strip() for part in text.split("\\cup")])
    if kind is Kind.SEQUENCE:
        interval = _interval_of(text) or text
        return Parts(split(interval[1:-1]), interval[0] + interval[-1])
    if text == "\\emptyset":
        return Parts([])
    inner = text[2:-2] if text.startswith("\\{") and text.endswith("\\}") else OR.sub(",", text)
    return Parts([written for part in split(inner) for written in _both_signs(part)])


def _both_signs(part: str) -> list[str]:
    if "\\pm" not in part:
        return [part]
    return [part.replace("\\pm", sign).removeprefix("+").strip() for sign in ("+", "-")]


def split(text: str) -> list[str]:
    """Cut at the commas that stand in no brackets; a number with thousands separators is not cut.

    Example:
        >>> split("1, (2,3), x"), split("1,000")
        (['1', '(2,3)', 'x'], ['1,000'])
    """
    if re.fullmatch(r"\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*", text):
        return [text.strip()]
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if character in ",;" and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def _is_enclosed(text: str) -> bool:
    """One pair of round or square brackets, not necessarily alike, stands around everything."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return False
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return position == len(text) - 1
    return False


def _interval_of(text: str) -> str:
    """The interval that an inequality of one variable describes; empty: it is none."""
    two = TWO_SIDED.fullmatch(text)
    if two:
        low, opening, closing, high = two.groups()
        return f"{'(' if opening == '<' else '['}{low.strip()},{high.strip()}{')' if closing == '<' else ']'}"
    one = ONE_SIDED.fullmatch(text)
    if one is None:
        return ""
    bound = one[2].strip()
    return {
        "<": f"(-\\infty,{bound})",
        "\\le": f"(-\\infty,{bound}]",
        ">": f"({bound},\\infty)",
        "\\ge": f"[{bound},\\infty)",
    }[one[1]]
