"""Which reward functions there are: the built-in ones by name, a user's own by import path.

A function may be written with AReaL's signature, `fn(prompt, completion, prompt_ids, completion_ids, **data)`, or with
any part of it: what it gets is what its parameters name, from those four and from the dataset row. It may be `async`.

Example:
    >>> from headway.reward import reward_function
    >>> @reward_function(is_pure=True)
    ... def shouts(completion: str) -> bool:
    ...     "Everything is in capitals."
    ...     return completion.isupper()
    >>> described(shouts).summary
    'Everything is in capitals.'
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headway.errors import InvalidInput

BUILT_IN = {
    "exact": "headway.reward.text.exact",
    "last_number": "headway.reward.text.last_number",
    "gsm8k": "headway.reward.text.gsm8k",
    "math": "headway.reward.mathematics.math",
    "multiple_choice": "headway.reward.choice.multiple_choice",
    "format": "headway.reward.shape.format",
    "length": "headway.reward.shape.length",
    "countdown": "headway.reward.countdown.countdown",
    "reasoning_gym": "headway.reward.procedural.reasoning_gym",
    "judge": "headway.reward.judge.judge",
}
"""Import path of each built-in function."""


def register(name: str, path: str) -> None:
    """Add a function that is there only where it can run, e.g. only inside the reward service."""
    BUILT_IN[name] = path


ATTRIBUTE = "__headway_reward__"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Traits:
    """What the pool must know of a function, and cannot see in it."""

    is_pure: bool = False
    """The same arguments always give the same result: duplicates may be answered from a cache."""
    starts_processes: bool = False
    """Needs child processes; all others are forbidden to start any."""
    typical_s: float = 0.001
    """A first guess of its running time, seconds; measured times replace it."""
    imports: tuple[str, ...] = ()
    """Modules to load once, before workers are forked."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function with what is known of it."""

    name: str
    call: Callable[..., Any]
    summary: str
    traits: Traits
    is_async: bool


def reward_function(
    *, is_pure: bool = False, starts_processes: bool = False, typical_s: float = 0.001, imports: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Say of a function what the pool cannot see: see `Traits`. Functions without the mark are the careful default."""
    traits = Traits(is_pure, starts_processes, typical_s, imports)

    def mark(function: Function) -> Function:
        setattr(function, ATTRIBUTE, traits)
        return function

    return mark


def described(call: Callable[..., Any], name: str = "") -> RewardFunction:
    """A callable with its name, the first sentence of its documentation, and its traits."""
    summary = (inspect.getdoc(call) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0]
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    traits = getattr(call, ATTRIBUTE, Traits())
    return RewardFunction(name or getattr(call, "__name__", "function"), call, summary, traits, is_async)


def find_function(name: str) -> RewardFunction:
    """The built-in function of this name, or the one at the import path `package.module.function`.

    Raises:
        InvalidInput: There is none; the message says what was looked for.
    """
    path = BUILT_IN.get(name, name)
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name:
        known = ", ".join(sorted(BUILT_IN))
        raise InvalidInput(f"no reward function {name!r}: use one of {known}, or an import path, `package.function`")
    try:
        call = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"cannot load the reward function {name!r}: {error}") from error
    if not callable(call):
        raise InvalidInput(f"the reward function {name!r} is a {type(call).__name__}, not a callable")
    return described(call, name)
