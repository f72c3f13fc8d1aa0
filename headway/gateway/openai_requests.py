"""What `openai` clients send: `/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from headway.gateway.calls import Chat
from headway.gateway.errors import Unsupported
from headway.gateway.sampling import Asked
from headway.gateway.wire import Body, TextPart, arguments_of, text_of, without_nulls

MAX_CHOICES = 128
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
HARMLESS = frozenset(
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)


class FunctionCall(BaseModel):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: str


class CallOfTool(BaseModel):
    """A tool call in the history."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """A message of the history. Fields of answers that clients send back are accepted by name."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallOfTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return without_nulls(data) if isinstance(data, Mapping) else data

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        for field in ("name", "tool_call_id"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        return message


class Function(BaseModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    """What a stream tells."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Generating(Body):
    """What both APIs have in common."""

    harmless: ClassVar[frozenset[str]] = HARMLESS
    model: str
    """Any name: there is one policy."""
    max_tokens: PositiveInt | None = None
    """At most what the session may still generate, which is also the default."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def asked(self, max_tokens: int | None) -> Asked:
        """What it says of sampling."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Asked(max_tokens, self.temperature, self.top_p, self.top_k, self.frequency_penalty, stop)


class ChatRequest(Generating):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "seed": (),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "top_logprobs": (0,),
        "reasoning_effort": (),
        "verbosity": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "functions": (),
        "function_call": (),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, for instance `enable_thinking`."""

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        if self.messages[-1].role == "assistant":
            raise Unsupported("messages", "the last message is the assistant's: an answer begun is not continued")
        if self.tool_choice not in (None, "auto", "none"):
            raise Unsupported(
                "tool_choice", "tool_choice is 'auto' or 'none': the policy itself decides whether it calls a tool"
            )
        return self

    def chat(self) -> Chat:
        """The call."""
        return Chat(
            messages=[message.plain() for message in self.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            calls_tools=self.tool_choice != "none",
            max_calls=1 if self.parallel_tool_calls is False else None,
            asked=self.asked(self.max_completion_tokens or self.max_tokens),
            template_kwargs=self.chat_template_kwargs or {},
        )


class CompletionRequest(Generating):
    """`POST /v1/completions`: a text, or token ids, that the policy goes on with."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "seed": (),
        "suffix": ("",),
        "echo": (False,),
    }
    prompt: str | list[int] | Annotated[list[str], Field(min_length=1, max_length=1)]
    """One text, or the ids of one; not several."""
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0: log-probabilities of the tokens themselves; alternatives are not known."""

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise Unsupported("best_of", "best_of is not supported, but for the value of n")
        return self

    def text(self) -> str | Sequence[int]:
        """The prompt."""
        only = self.prompt[0] if self.prompt else self.prompt
        return only if isinstance(only, str) and isinstance(self.prompt, list) else self.prompt  # type: ignore[return-value]
