"""A tokenizer of one character a token, and an engine that answers from a list."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.trajectory import StopReason
from headway.testing.scripted_policy import EOS, CharacterTokenizer
from headway.workflow import ModelRequest, ModelResponse


class CharTokenizer(CharacterTokenizer):
    """The same, with a template that can ask for thoughts."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **kwargs: Any
    ) -> list[int]:
        ids = super().apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, **kwargs)
        is_asked = add_generation_prompt and kwargs.get("enable_thinking")
        return ids + self.encode("<think>") if is_asked else ids


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
