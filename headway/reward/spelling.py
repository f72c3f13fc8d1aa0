"""Bring a mathematical answer into one spelling, and cut it into name, value and unit. Pure, without sympy.

"$x = \\dfrac{1}{2}\\text{ cm}$"   ->   name "x", value "\\frac{1}{2}", unit "cm"
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from headway.reward.answers import closing_brace

MAX_NUMBER_CHARS = 400
MAX_EXPONENT = 400

SPELLINGS = (
    *(("−", "-"), ("–", "-"), ("\\minus", "-"), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cfrac", "\\frac")),
    *(("{,}", ","), ("\\%", "%"), ("\\$", "$"), ("\\varnothing", "\\emptyset"), ("\\{\\}", "\\emptyset")),
    *(("\\lbrace", "\\{"), ("\\rbrace", "\\}"), ("\\leqslant", "\\le"), ("\\geqslant", "\\ge"), ("\\leq", "\\le")),
    *(("\\geq", "\\ge"), ("≤", "\\le "), ("≥", "\\ge "), ("π", "\\pi "), ("∞", "\\infty "), ("∪", "\\cup ")),
    *(("×", "\\times "), ("√", "\\sqrt "), ("^{\\circ}", "°"), ("^\\circ", "°"), ("\\degree", "°"), ("²", "^2")),
    *(("³", "^3"), ("\\lt", "<"), ("\\gt", ">"), ("\\$", "$")),
)
REMOVED = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,!;: ]|~")
WRAPPER = re.compile(r"\\(?:boldsymbol|mathbf|bm|mathrm|mathit|textbf|textit|text|mbox|operatorname)\s*\{")
ONE_IN_SPACED_THOUSANDS = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")

PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE]([-+]?\d{1,4}))?")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
FRACTION = re.compile(r"([-+]?)(?:\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}|\\frac(\d)(\d)|(\d+)/(\d+))")

NAMED = re.compile(r"([A-Za-z]|[a-zA-Z]\([a-z]\)|\\[a-z]+)\s*(?:=|\\in\b)\s*([^=]+)")
BEFORE_UNIT = re.compile(r"(.*?(?:[\d})]|\\pi))( ?)([A-Za-z°%][A-Za-z°%\d^{}/ ]*)")
NO_UNITS = frozenset(
    [
        *("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "third", "quarter", "mod", "sin"),
        *("cos", "tan", "log", "exp", "sqrt", "inf", "infinity", "factorial", "times", "squared", "cubed", "and"),
    ]
)
UNIT_NAMES = {
    "mm": ("millimeter", "millimetre"),
    "cm": ("centimeter", "centimetre"),
    "m": ("meter", "metre"),
    "km": ("kilometer", "kilometre"),
    "in": ("inch", "inches"),
    "ft": ("foot", "feet"),
    "yd": ("yard",),
    "mi": ("mile",),
    "g": ("gram",),
    "kg": ("kilogram",),
    "lb": ("pound",),
    "ml": ("milliliter", "millilitre"),
    "liter": ("litre",),
    "s": ("second", "sec"),
    "min": ("minute",),
    "h": ("hour", "hr"),
    "day": (),
    "week": (),
    "month": (),
    "year": ("yr",),
    "mph": ("mi/h",),
    "dollar": ("usd",),
    "cent": (),
    "°": ("degree", "deg"),
    "%": ("percent",),
}
CANONICAL_UNIT = {spelling: unit for unit, spellings in UNIT_NAMES.items() for spelling in (unit, *spellings)}
WORD = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer in its parts; those that it does not have are empty."""

    value: str
    unit: str = ""
    name: str = ""


def normal_spelling(text: str) -> str:
    """One spelling for what LaTeX can write in many ways; the meaning stays.

    Example:
        >>> normal_spelling("$\\\\dfrac{1}{2}\\\\,.$")
        '\\\\frac{1}{2}'
    """
    plain = ONE_IN_SPACED_THOUSANDS.sub(",", text.strip())
    if plain.startswith("$") and plain.endswith("$"):
        plain = plain.strip("$")
    for written, normal in SPELLINGS:
        plain = plain.replace(written, normal)
    plain = REMOVED.sub("", plain)
    return re.sub(r"\s+", " ", _unwrapped(plain)).strip().rstrip(".").strip()


def _unwrapped(text: str) -> str:
    """Without commands that only say how their content looks."""
    while (wrapper := WRAPPER.search(text)) is not None:
        end = closing_brace(text, wrapper.end() - 1)
        inside = text[wrapper.end() : end] if end is not None else text[wrapper.end() :]
        text = f"{text[: wrapper.start()]} {inside} {text[end + 1 :] if end is not None else ''}"
    return text


def cut(text: str) -> Quantity:
    """The parts of an answer in normal spelling.

    Example:
        >>> cut("x = 5 cm"), cut("$2.50").unit, cut("3n+2").value
        (Quantity(value='5', unit='cm', name='x'), 'dollar', '3n+2')
    """
    named = NAMED.fullmatch(text)
    name, value = (named[1], named[2].strip()) if named else ("", text)
    for sign in ("", "-"):
        if value.startswith(f"{sign}$"):
            return Quantity(sign + value[len(sign) + 1 :].strip(), "dollar", name)
    match = BEFORE_UNIT.fullmatch(value)
    unit = canonical_unit(match[3], is_apart=match[2] == " ") if match else ""
    return Quantity(match[1], unit, name) if match and unit else Quantity(value, "", name)


def canonical_unit(text: str, is_apart: bool = True) -> str:
    """One name for a unit's spellings; empty: it is no unit. Single letters are units only apart from their number.

    Example:
        >>> canonical_unit("kilometers per hour"), canonical_unit("cm^{2}"), canonical_unit("square feet")
        ('km/h', 'cm^2', 'ft^2')
        >>> canonical_unit("x"), canonical_unit("n+2", is_apart=False)
        ('', '')
    """
    plain = re.sub(r"[{}]", "", text.lower()).strip(" .")
    if len(plain) == 1 and plain.isalpha() and not is_apart:
        return ""
    plain = re.sub(r"\s*\^\s*", "^", re.sub(r"\s*(?:/|\bper\b)\s*", "/", plain))
    for adjective, power in (("square ", "^2"), ("sq ", "^2"), ("cubic ", "^3")):
        if plain.startswith(adjective):
            plain = plain.removeprefix(adjective) + power
    parts = [_canonical_part(part) for part in plain.split("/")]
    joined = "/".join(parts)
    return CANONICAL_UNIT.get(joined, joined) if all(parts) else ""


def _canonical_part(part: str) -> str:
    """One factor of a unit, "meters^2"; empty: it is none."""
    word, hat, power = part.partition("^")
    singular = word if word in CANONICAL_UNIT else word.removesuffix("s")
    is_word = WORD.fullmatch(word) and not hat and not {word, singular} & NO_UNITS
    known = CANONICAL_UNIT.get(singular) or (singular if is_word else "")
    return known + hat + power if known and (not hat or power.isdecimal()) else ""


def exact_number(text: str) -> Fraction | None:
    """The value of a number written with digits; None: it is something else.

    Example:
        >>> exact_number("1,234.5"), exact_number("\\\\frac{-6}{4}"), exact_number("1,23"), exact_number("2x")
        (Fraction(2469, 2), Fraction(-3, 2), None, None)
    """
    plain = text.strip()
    if len(plain) > MAX_NUMBER_CHARS:
        return None
    if THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    number = PLAIN_NUMBER.fullmatch(plain)
    if number is not None:
        # Fraction does not read "5."
        return None if abs(int(number[1] or 0)) > MAX_EXPONENT else Fraction(re.sub(r"\.(?=$|[eE])", "", plain))
    fraction = FRACTION.fullmatch(plain.replace(" ", ""))
    if fraction is None:
        return None
    above, below = [int(part) for part in fraction.groups()[1:] if part is not None]
    return Fraction(-above if fraction[1] == "-" else above, below) if below else None
