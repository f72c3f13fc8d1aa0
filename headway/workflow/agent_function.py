"""An agent that is an async function in the controller's own process, called with what its parameters name."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from headway.errors import InvalidInput
from headway.gateway.gateway import Access
from headway.workflow.load import load_object

Function = Callable[..., Awaitable[Any]]


class FunctionAgent:
    """Calls a function for each episode.

    Args:
        path: Import path of an async function, or of a class with an async method `run`.
        when_closed: Takes what must be called in the end.

    Raises:
        InvalidInput: There is none, it is not async, or has parameters that nobody fills.
    """

    def __init__(self, path: str, when_closed: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        self._path = path
        self._function = _function_of(path)
        self._names = self._checked_names()
        self._client: Any = None
        if "client" in self._names:
            self._client = _openai_client()
            when_closed(self._client.close)

    async def run(self, data: dict[str, Any], access: Access) -> Any:
        """Call it; its result."""
        given: dict[str, Any] = {
            "data": data,
            "base_url": access.openai_url,
            "api_key": access.api_key,
            "access": access,
        }
        if self._client is not None:
            given["client"] = self._client.with_options(base_url=access.openai_url, api_key=access.api_key)
        return await self._function(**{name: given[name] for name in self._names})

    def _checked_names(self) -> list[str]:
        known = ("data", "base_url", "api_key", "client", "access")
        parameters = inspect.signature(self._function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return [name for name in known if name != "client"]
        names = [p.name for p in parameters if p.name in known or p.default is p.empty]
        if strange := [name for name in names if name not in known]:
            raise InvalidInput(f"{self._path} asks for {', '.join(strange)}; an agent is given {', '.join(known)}")
        return names


def _function_of(path: str) -> Function:
    found: Any = load_object(path)
    function = getattr(found(), "run", None) if inspect.isclass(found) else found
    if not inspect.iscoroutinefunction(function):
        raise InvalidInput(f"{path} is neither an async function nor a class with an async method `run`")
    made: Function = function
    return made


def _openai_client() -> Any:
    """One client for all episodes: they share its connections."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise InvalidInput(
            "an agent with the parameter `client` needs the package openai: pip install 'headway[agents]'"
        ) from error
    for name in ("httpx", "httpx2"):  # whichever it uses: a line for each call is too much
        logging.getLogger(name).setLevel(logging.WARNING)
    return AsyncOpenAI(base_url="http://unused", api_key="unused")
