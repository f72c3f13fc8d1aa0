"""What `anthropic` clients send: `/v1/messages`, translated to the messages of chat templates."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from headway.gateway.calls import Chat
from headway.gateway.errors import Unsupported
from headway.gateway.sampling import Asked
from headway.gateway.wire import Body

HARMLESS = frozenset(["metadata", "service_tier", "inference_geo", "container"])


class Block(BaseModel):
    """A part of a message. `cache_control` and the like change no answer."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ToolUse(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[TextBlock | ToolUse | ToolResult, Field(discriminator="type")]


class AnthropicMessage(BaseModel):
    """A message of the history."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "assistant"]
    content: str | list[AnyBlock]

    def plain(self) -> Iterator[dict[str, Any]]:
        """As chat templates take it; the results of tools are messages of their own, before the text."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        if self.role == "assistant":
            yield from self._assistant("".join(texts))
            return
        for block in self.content:
            if isinstance(block, ToolResult):
                yield {"role": "tool", "content": _text(block.content), "tool_call_id": block.tool_use_id}
        if texts:
            yield {"role": "user", "content": "\n".join(texts)}

    def _assistant(self, text: str) -> Iterator[dict[str, Any]]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUse)
        ]
        yield {**message, "tool_calls": calls} if calls else message


class AnthropicTool(BaseModel):
    """A tool that the model may call. Tools that Anthropic's servers run are refused."""

    model_config = ConfigDict(extra="ignore")
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class ToolChoice(BaseModel):
    """Whether tools are called."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool = False


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    harmless: ClassVar[frozenset[str]] = HARMLESS
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "thinking": ({"type": "disabled"},),
        "mcp_servers": ([],),
        "context_management": (),
        "output_config": (),
        "output_format": (),
        "cache_control": ({"type": "ephemeral"},),
    }
    model: str
    """Any name: there is one policy."""
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None

    @model_validator(mode="after")
    def _check(self) -> "CountRequest":
        if self.messages[-1].role == "assistant":
            raise Unsupported("messages", "the last message is the assistant's: an answer begun is not continued")
        return self

    def chat(self, asked: Asked | None = None) -> Chat:
        """The call."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        choice = self.tool_choice or ToolChoice(type="auto")
        return Chat(
            messages=[*system, *(plain for message in self.messages for plain in message.plain())],
            tools=[tool.plain() for tool in self.tools or ()],
            calls_tools=choice.type == "auto",
            max_calls=1 if choice.disable_parallel_tool_use else None,
            asked=asked or Asked(),
        )


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: PositiveInt
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def asked(self) -> Asked:
        """What it says of sampling."""
        stop = tuple(self.stop_sequences or ())
        return Asked(self.max_tokens, self.temperature, self.top_p, self.top_k, None, stop)


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)
