"""What the request models of both APIs share: strict about what would change an answer, easy about what would not.

A parameter is read, or accepted by name as harmless, or accepted at the value at which it changes nothing; everything
else is refused by name.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from headway.errors import InvalidInput
from headway.gateway.errors import Unsupported


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Parameters that change no answer."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Parameters that cannot be followed, and the values at which they change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for name, values in cls.neutral.items():
            if name in data and data[name] is not None and data[name] not in values:
                raise Unsupported(name, f"{name!r} is not supported{_but(values)}; it was {data[name]!r}")
        left = {name: value for name, value in data.items() if name not in cls.harmless and name not in cls.neutral}
        return without_nulls(left)


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that say nothing: clients write null for what they leave out, also under names of their own."""
    return {name: value for name, value in data.items() if value is not None}


def _but(values: tuple[Any, ...]) -> str:
    return f", but for {' or '.join(map(repr, values))}" if values else ""


class TextPart(BaseModel):
    """A part of a message. Images, sound and files are refused: the policy reads text."""

    type: Literal["text"]
    text: str


def text_of(content: str | list[TextPart] | None, between: str = "\n") -> str:
    """A message's content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(part.text for part in content)


def arguments_of(text: str) -> Any:
    """The arguments of a tool call as chat templates take them: a dict, or the text where it is none."""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return arguments if isinstance(arguments, dict) else text


def first_fault(error: ValidationError) -> tuple[str, str]:
    """Where and what the first fault of a body is; of the alternatives of a field, the one that fits best."""
    first, *others = error.errors(include_url=False, include_context=False)
    fault = max([first, *(o for o in others if o["loc"][:1] == first["loc"][:1])], key=lambda fault: len(fault["loc"]))
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return place, f"unknown parameter {place!r}"
    return place, f"{place}: {fault['msg']}" if place else fault["msg"]


def parse(model: type[BaseModel], data: bytes) -> Any:
    """A body by its model.

    Raises:
        InvalidInput: The body is not JSON, or not of this form; the message names the place.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        place, text = first_fault(error)
        raise Unsupported(place, text) from None if place else InvalidInput(text)
