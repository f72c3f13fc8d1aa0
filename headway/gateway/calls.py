"""A call of the chat API, whichever one it came through, and its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.trajectory import StopReason
from headway.gateway.history import Message
from headway.gateway.sampling import Asked
from headway.gateway.tool_calls import ToolCall
from headway.gateway.transcript import Turn


@dataclass(frozen=True, slots=True)
class Chat:
    """A call."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """As chat templates take them: `{"type": "function", "function": {"name": ...}}`."""
    calls_tools: bool = True
    """Whether tool calls are looked for in the answer."""
    max_calls: int | None = None
    """Calls of one answer that the client is told of; None: all."""
    asked: Asked = field(default_factory=Asked)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the model, as the client's API will tell it."""

    turn: Turn
    num_prompt_tokens: int
    text: str
    calls: Sequence[tuple[str, ToolCall]] = ()
    """With their ids."""
    stop_string: str | None = None

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        if self.calls:
            return "tool_calls"
        return "length" if self.turn.response.stop_reason is StopReason.LENGTH else "stop"


def message_of(answer: Answer) -> dict[str, Any]:
    """The answer as a message of the history that a client will send back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in answer.calls
        ]
    return message
