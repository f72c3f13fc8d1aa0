"""Judge model-written code by its tests, without ever running both in one process.

The candidate runs in the sandbox. Its judge runs outside: test code in a child of this worker that may do nothing but
compute, comparisons of outputs in the worker itself. Between them go plain values and text. So a candidate can be
wrong, dead or silent, and cannot decide its own verdict: it finds no test to change, no verdict to write, no equality
to lie with.

A candidate that is wrong, dies, or uses up its time has failed its test: that is a verdict. Time counts while it runs
or sleeps, not while a busy machine keeps it waiting. A sandbox that is missing or broken is an error, never a verdict.
"""

import ast
import builtins
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from headway.errors import InvalidInput, Unavailable
from headway.reward.program import Assertions, Calls, Programs, Suite, program_in, same_output, same_value, suite_in
from headway.reward.registry import reward_function
from services.reward.remote import CandidateLost, Channel, Remote
from services.reward.sandbox import Limits, Program, layers, memory_file
from services.reward.seal import Seal, close

MAX_INT_DIGITS = 100_000


@reward_function(starts_processes=True, typical_s=0.05)
def code(
    completion: str,
    prompt: str = "",
    time_limit_s: float = 6.0,
    memory_mb: int = 512,
    partial: bool = False,
    **row: Any,
) -> float:
    """The code passes its tests: 1 for all of them, else 0; with `partial`, the share of tests passed."""
    if not layers().has_sandbox:
        raise Unavailable("model-written code is not run without a sandbox: " + "; ".join(layers().missing))
    sys.set_int_max_str_digits(MAX_INT_DIGITS)
    suite = suite_in(row)
    source = _complete(program_in(completion), prompt, row)
    judge = Judge(
        source, time_limit_s, Limits(memory_mb, cpu_s=max(1, round(time_limit_s + 0.5))), stop_early=not partial
    )
    passed, total = judge.passed(suite)
    return passed / total if partial else float(passed == total)


def _complete(source: str, prompt: str, row: dict[str, Any]) -> str:
    """HumanEval's completions may begin inside the function that the prompt has begun."""
    entry = row.get("entry_point")
    if entry and f"def {entry}" not in source and f"def {entry}" in prompt:
        return prompt + source
    return source


@dataclass
class Judge:
    """Runs the tests of one candidate."""

    source: str
    time_limit_s: float
    limits: Limits
    stop_early: bool = True

    def passed(self, suite: Suite) -> tuple[int, int]:
        """Tests passed, and tests there are. With `stop_early` the first failure ends the count."""
        match suite:
            case Programs():
                return self._count(map(self._run_program, suite.cases)), len(suite.cases)
            case Calls():
                with self._serving() as channel:
                    return self._count(_call_results(channel, suite)), len(suite.cases)
            case Assertions():
                with self._serving() as channel:
                    return _in_child(lambda: self._count(_assertion_results(channel, suite))), len(suite.tests)

    def _count(self, results: Iterator[bool]) -> int:
        count = 0
        for result in results:
            count += result
            if self.stop_early and not result:
                break
        return count

    def _run_program(self, case: tuple[str, str]) -> bool:
        """One run of the whole program: it ends well, in time, and has written what was expected."""
        given, expected = case
        stdin, stdout = memory_file(given.encode()), memory_file(b"")
        try:
            with Program("program", self.source, self.limits, stdin, stdout) as program:
                while (remaining_s := self.time_limit_s - program.own_time_s()) > 0:
                    if (exit_code := program.wait(remaining_s)) is not None:
                        output = os.pread(stdout, self.limits.file_bytes, 0).decode(errors="replace")
                        return exit_code == 0 and same_output(output, expected)
            return False
        finally:
            os.close(stdin)
            os.close(stdout)

    @contextmanager
    def _serving(self) -> Iterator[Channel]:
        """The candidate, loaded and ready to be called."""
        (stdin, requests), (answers, stdout) = os.pipe(), os.pipe()
        ends = [stdin, stdout]
        try:
            with Program("serve", self.source, self.limits, stdin, stdout) as program:
                while ends:
                    os.close(ends.pop())
                yield Channel(requests, answers, lambda: self.time_limit_s - program.own_time_s())
        finally:
            for descriptor in (requests, answers, *ends):
                os.close(descriptor)


def _call_results(channel: Channel, suite: Calls) -> Iterator[bool]:
    """Whether each call returns what is expected."""
    try:
        channel.loaded()
        target = _resolved(channel, suite.function)
        for arguments, expected in suite.cases:
            yield _is_expected(target, arguments, expected)
    except (CandidateLost, Exception):  # noqa: BLE001 - whatever the candidate raises is its failure
        yield False


def _resolved(channel: Channel, function: str) -> Any:
    """The candidate's function of this name, or the method of its `Solution`."""
    if function in channel.ask("names()"):
        return Remote(channel, function, "function")
    return getattr(Remote(channel, "Solution", "type")(), function)


def _is_expected(target: Any, arguments: Sequence[Any], expected: Any) -> bool:
    try:
        value = target(*arguments)
    except Exception:  # noqa: BLE001 - whatever the candidate raises is its failure
        return False
    is_wrapped = isinstance(expected, list) and len(expected) == 1  # APPS wraps the value in a list
    return same_value(value, expected) or (is_wrapped and same_value(value, expected[0]))


def _assertion_results(channel: Channel, suite: Assertions) -> Iterator[bool]:
    """Whether each piece of test code raises nothing.

    Raises:
        InvalidInput: The test code cannot be compiled, or its setup fails.
    """
    try:
        channel.loaded()
        names = channel.ask("names()")
    except (CandidateLost, Exception):  # noqa: BLE001 - whatever the candidate raises is its failure
        yield False
        return
    compiled = [_compiled(text) for text in (suite.setup, *suite.tests)]
    space = _namespace(channel, names, "\n".join([suite.setup, *suite.tests]))
    try:
        exec(compiled[0], space)
    except Exception as error:  # test code may raise anything; the reply says what
        raise InvalidInput(f"the setup of the tests fails: {type(error).__name__}: {error}") from error
    for test in compiled[1:]:
        try:
            exec(test, space)
        except (CandidateLost, Exception):  # noqa: BLE001 - a test that raises has failed
            yield False
        else:
            yield True


def _compiled(text: str) -> Any:
    try:
        return compile(text, "<tests>", "exec")
    except SyntaxError as error:
        raise InvalidInput(f"the test code is no Python: {error}") from error


def _namespace(channel: Channel, names: dict[str, str], text: str) -> dict[str, Any]:
    """What test code may name of the candidate's: functions by handle, modules as our own copy; never a builtin."""
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    space: dict[str, Any] = {"__name__": "tests"}
    for name in (used & names.keys()) - set(dir(builtins)):
        module = names[name]
        if not module:
            space[name] = Remote(channel, name, "function")
        elif module in sys.stdlib_module_names:
            space[name] = importlib.import_module(module)
    return space


def _in_child(judge: Callable[[], int]) -> int:
    """Run a judge in a child that may only compute, because it runs test code.

    Raises:
        InvalidInput: The test code is wrong.
        Unavailable: The judge died.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_judge(judge, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as verdict:
        told = verdict.read(4096)
    os.waitpid(pid, 0)
    if not told:
        raise Unavailable("the judge died")
    if told[:1] == b"!":
        raise InvalidInput(told[1:].decode(errors="replace"))
    return int(told)


def _be_judge(judge: Callable[[], int], writing: int) -> NoReturn:
    told = b""
    try:
        close(Seal.SEALED)
        told = str(judge()).encode()
    except InvalidInput as error:
        told = f"!{error}".encode()[:4096]
    finally:
        os.write(writing, told)
        os._exit(0)
