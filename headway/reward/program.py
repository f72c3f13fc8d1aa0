"""Read what a row asks of a program, and the program in a completion.

    test_list, tests (list of assertions) [test_setup_code, test_imports]      MBPP
    test, entry_point                                                          HumanEval
    input_output {inputs, outputs[, fn_name]}, or these at the top of the row  APPS, TACO, LiveCodeBench
    tests (list of {input, output})                                            stdin and stdout

Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from headway.errors import InvalidInput

FENCED = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "py", "python3", "")


@dataclass(frozen=True, slots=True)
class Assertions:
    """Pieces of test code; each passes when it raises nothing."""

    tests: Sequence[str]
    setup: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one function, or of a method of `Solution`: (arguments, expected value) each."""

    function: str
    cases: Sequence[tuple[Sequence[Any], Any]]


@dataclass(frozen=True, slots=True)
class Programs:
    """Runs of a whole program: (stdin, expected stdout) each."""

    cases: Sequence[tuple[str, str]]


Suite = Assertions | Calls | Programs


def program_in(completion: str) -> str:
    """The last fenced block of Python in a completion; without any, all of it.

    Example:
        >>> program_in("So:\\n```python\\nprint(1)\\n```\\nDone.")
        'print(1)\\n'
    """
    blocks = [(language.lower(), code) for language, code in FENCED.findall(completion)]
    python = [code for language, code in blocks if language in PYTHON]
    return python[-1] if python else completion if not blocks else blocks[-1][1]


def suite_in(row: Mapping[str, Any]) -> Suite:
    """What a row asks of a program.

    Raises:
        InvalidInput: It has no tests in a form known here, or none at all.
    """
    suite = _suite_in(row)
    if not (suite.tests if isinstance(suite, Assertions) else suite.cases):
        raise InvalidInput("the row's list of tests is empty")
    return suite


def _suite_in(row: Mapping[str, Any]) -> Suite:
    if "test" in row and "entry_point" in row:
        return Assertions([f"{row['test']}\ncheck({row['entry_point']})"])
    if "input_output" in row:
        return _input_output(_loaded(row["input_output"]))
    if "inputs" in row and "outputs" in row:
        return _input_output(row)
    tests = _loaded(row.get("test_list") or row.get("tests"))
    if isinstance(tests, Mapping):
        return _input_output(tests)
    if not isinstance(tests, Sequence) or isinstance(tests, str):
        raise InvalidInput(f"the row has no tests in a known form; its columns are {', '.join(sorted(row))}")
    if all(isinstance(test, str) for test in tests):
        setup = [str(row.get("test_setup_code") or ""), *(row.get("test_imports") or [])]
        return Assertions(tests, "\n".join(setup))
    return _pairs([(test["input"], test["output"]) for test in tests], row.get("fn_name") or row.get("entry_point"))


def _loaded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"the row's tests are no JSON: {error}") from error


def _input_output(tests: Any) -> Suite:
    if not isinstance(tests, Mapping) or "inputs" not in tests or "outputs" not in tests:
        raise InvalidInput("the row's tests have no `inputs` and `outputs`")
    if len(tests["inputs"]) != len(tests["outputs"]):
        raise InvalidInput(f"{len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
    return _pairs(list(zip(tests["inputs"], tests["outputs"], strict=True)), tests.get("fn_name"))


def _pairs(pairs: Sequence[tuple[Any, Any]], function: Any) -> Suite:
    if function:
        return Calls(str(function), [(_arguments(given), _expected(wanted)) for given, wanted in pairs])
    return Programs([(_text(given), _text(wanted)) for given, wanted in pairs])


def _arguments(given: Any) -> Sequence[Any]:
    """LiveCodeBench writes one JSON value a line, APPS a list."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return given if isinstance(given, Sequence) else [given]


def _expected(wanted: Any) -> Any:
    if isinstance(wanted, str):
        try:
            return json.loads(wanted)
        except json.JSONDecodeError:
            return wanted
    return wanted


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, Sequence) else str(value)
    )


def same_value(value: Any, expected: Any) -> bool:
    """Whether a returned plain value is the one that JSON can write: tuples count as lists.

    Example:
        >>> same_value((1, 2), [1, 2]), same_value(True, 1)
        (True, False)
    """
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        keyed = {str(key): item for key, item in value.items()}
        return keyed.keys() == expected.keys() and all(same_value(keyed[key], expected[key]) for key in keyed)
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs agree line by line and word by word; numbers agree by value.

    Example:
        >>> same_output("1.0 x \\n", "1 x"), same_output("1 2", "1\\n2")
        (True, False)
    """
    lines, wanted = (_words(text) for text in (output, expected))
    return len(lines) == len(wanted) and all(
        len(line) == len(other) and all(map(_same_word, line, other)) for line, other in zip(lines, wanted, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().splitlines()]


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    try:
        return Decimal(word) == Decimal(other)
    except InvalidOperation:
        return False
