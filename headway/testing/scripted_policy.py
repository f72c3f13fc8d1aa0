"""A policy without a model: a tokenizer of one character a token, with tools, and an engine that answers by a script.

For trying an agent, or the gateway, when what matters is not what the model says.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from headway.core.trajectory import StopReason
from headway.workflow.api import ModelRequest, ModelResponse

EOS = 2
LOGPROB = -0.5
Script = Callable[[ModelRequest], str | Exception]
"""What to answer to a request; an answer without the end token is one that was cut off."""


class CharacterTokenizer:
    """Token ids are code points; a message ends with EOS and a newline. Calls and tools are written as Hermes does."""

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
        tools: Sequence[Any] = (),
        **kwargs: Any,
    ) -> list[int]:
        head = f"<tools>{orjson.dumps(tools).decode()}\n" if tools else ""
        text = head + "".join(f"<{m['role']}>{m['content']}{_calls(m)}{chr(EOS)}\n" for m in conversation)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


def _calls(message: Mapping[str, Any]) -> str:
    return "".join(
        f"<tool_call>{orjson.dumps(call['function']).decode()}</tool_call>" for call in message.get("tool_calls") or ()
    )


class ScriptedPolicy:
    """Answers by a script, as version `step`; while it holds, answers are not given."""

    def __init__(self, script: Script, step: int = 3) -> None:
        self.script = script
        self.step = step
        self.requests: list[ModelRequest] = []
        self.num_withdrawn = 0
        """Requests that were cancelled while it held."""
        self._changed = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def get_version(self) -> int:
        return self.step

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        self._notify()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.num_withdrawn += 1
            self._notify()
            raise
        answer = self.script(req)
        if isinstance(answer, Exception):
            raise answer
        ids = [ord(character) for character in answer]
        kept = ids[: req.gconfig.max_new_tokens]
        reason = StopReason.LENGTH if kept != ids or kept[-1:] != [EOS] else StopReason.STOP
        return ModelResponse(list(req.input_ids), kept, [LOGPROB] * len(kept), [self.step] * len(kept), reason)

    def hold(self) -> None:
        """Answer nothing from now on."""
        self._open.clear()

    def release(self) -> None:
        """Answer everything."""
        self._open.set()

    async def until(self, condition: Callable[["ScriptedPolicy"], bool], timeout_s: float = 20.0) -> None:
        """Wait until something has happened here.

        Raises:
            TimeoutError: It did not.
        """
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def answers(*texts: str | Exception) -> Script:
    """A script that goes through a list of finished answers."""
    left = list(texts)
    return lambda request: finished(left.pop(0))


def finished(answer: str | Exception) -> str | Exception:
    """An answer with its end token."""
    return answer + chr(EOS) if isinstance(answer, str) else answer
