"""Find the final answer in a text. Linear and pure.

It is what stands in the last box, after the last `####`, after the last "answer is", in the last formula, or else the
last number. Nothing before it counts: an answer is right or wrong by what it says last.
"""

import re

BOX = re.compile(r"\\f?boxed\s*|\\fbox\s*")
ANSWER_IS = re.compile(r"answer\s*(?:is|=|:)\s*:?\s*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-+−]?\$?(?:\d[\d,]*\d|\d)(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?|(?<![\w.])[-+−]?\.\d+%?")


def final_answer(text: str) -> str | None:
    """What a text says last as its answer; None: it says none.

    Example:
        >>> final_answer("2+2=4, so the answer is 4."), final_answer("\\\\boxed{1}, no: \\\\boxed{\\\\frac{1}{2}}")
        ('4', '\\\\frac{1}{2}')
    """
    if BOX.search(text):
        return _last_box(text)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    stated = list(ANSWER_IS.finditer(text))
    if stated:
        return _stated(text[stated[-1].end() :])
    formulas = list(FORMULA.finditer(text))
    if formulas:
        return _inside(formulas[-1])
    numbers = NUMBER.findall(text)
    return numbers[-1].strip() if numbers else None


def _stated(rest: str) -> str | None:
    """The formula, or else the sentence, at the beginning of what follows "answer is"."""
    formula = FORMULA.match(rest)
    if formula:
        return _inside(formula)
    return SENTENCE_END.split(rest, maxsplit=1)[0].strip().strip("*").rstrip(".") or None


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _last_box(text: str) -> str | None:
    """What stands in the last box that is closed."""
    for start in reversed([match.end() for match in BOX.finditer(text)]):
        if not text.startswith("{", start):
            words = text[start:].split(maxsplit=1)
            return words[0].rstrip("$.,") if words else None
        end = closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end].strip()
    return None


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace that opens at `start` is closed; `\\{` and `\\}` do not count."""
    depth, is_escaped = 0, False
    for position in range(start, len(text)):
        character = text[position]
        if not is_escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        is_escaped = character == "\\" and not is_escaped
    return None
