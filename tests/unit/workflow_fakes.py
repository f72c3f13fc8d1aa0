"""A tokenizer of one character a token, and an engine that answers from a list."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.trajectory import StopReason
from headway.workflow import ModelRequest, ModelResponse

EOS = 2


class CharTokenizer:
    """Token ids are code points; the end of a message is EOS and a newline, as many chat templates write it."""

    eos_token_id: int | None = EOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token == EOS))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}{chr(EOS)}\n" for m in conversation)
        thinking = "<think>" if kwargs.get("enable_thinking") else ""
        return self.encode(text + (f"<assistant>{thinking}" if add_generation_prompt else ""))


class ListEngine:
    """Gives the next answer of a list to each request, made by version `step`; a missing answer is an error."""

    def __init__(self, answers: Sequence[str | Exception], step: int = 3) -> None:
        self.requests: list[ModelRequest] = []
        self._answers = list(answers)
        self._step = step

    def get_version(self) -> int:
        return self._step

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = [ord(character) for character in answer]
        is_call = any(isinstance(stop, str) and answer.endswith(stop) for stop in req.tool_call_stops)
        reason = StopReason.TOOL_CALLS if is_call else StopReason.STOP if ids[-1:] == [EOS] else StopReason.LENGTH
        return ModelResponse(list(req.input_ids), ids, [-0.5] * len(ids), [self._step] * len(ids), reason)


async def right_is_one(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], /, **data: Any
) -> float:
    """1 when the row's answer is in the completion."""
    return float(data["answer"] in completion)
