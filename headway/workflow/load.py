"""Workflows, filters and other user code by import path, as the experiment file names them."""

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.config.rollout import GenerationHyperparameters
from headway.errors import InvalidInput
from headway.workflow.api import RewardFunction, RolloutWorkflow, Tokenizer
from headway.workflow.group import AcceptFunction

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway


def load_object(path: str) -> Any:
    """What `package.module.name` (or `package.module:name`) stands for.

    Raises:
        InvalidInput: There is no such module or name; the message says which, and the nearest one that exists.
    """
    module_path, _, name = path.replace(":", ".").rpartition(".")
    if not module_path:
        raise InvalidInput(f"{path!r} is no import path; write package.module.name")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{path}: there is no module {error.name!r} on the Python path") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInput(f"{path}: module {module_path!r} has no {name!r}{hint}")
    return getattr(module, name)


def load_workflow(
    path: str,
    kwargs: Mapping[str, Any],
    *,
    reward_fn: RewardFunction,
    gconfig: GenerationHyperparameters,
    tokenizer: Tokenizer,
    gateway: "Gateway | None" = None,
) -> RolloutWorkflow:
    """Make the workflow of the experiment file.

    The constructor is given those of `reward_fn`, `gconfig` (for one sample: n_samples is 1), `tokenizer` and `gateway`
    that it names, and `kwargs`, which win.

    Raises:
        InvalidInput: No such class, no workflow, or arguments that it does not take.
    """
    kind = load_object(path)
    if not callable(getattr(kind, "arun_episode", None)):
        raise InvalidInput(f"{path} is no workflow: it has no method arun_episode(engine, data)")
    one_sample = gconfig.model_copy(update={"n_samples": 1})
    standard = {"reward_fn": reward_fn, "gconfig": one_sample, "tokenizer": tokenizer, "gateway": gateway}
    parameters = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in standard.items() if takes_all or name in parameters}
    try:
        workflow: RolloutWorkflow = kind(**{**given, **kwargs})
    except TypeError as error:
        raise InvalidInput(f"{path} does not take the arguments of workflow.kwargs: {error}") from error
    return workflow


def load_filter(path: str | None) -> AcceptFunction | None:
    """The `should_accept_fn` of the experiment file.

    Raises:
        InvalidInput: There is no such function.
    """
    if path is None:
        return None
    function = load_object(path)
    if not callable(function):
        raise InvalidInput(f"{path} is no function")
    accept: AcceptFunction = function
    return accept
