"""What the model is asked to go on from: a known turn's ids and what is new after it, or another beginning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.gateway.calls import Chat
from headway.gateway.history import history_keys
from headway.gateway.policy import Policy
from headway.gateway.transcript import Transcript, Turn
from headway.workflow.api import Tokenizer
from headway.workflow.turns import closing_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A branch's turn, and what the model is told after it."""

    parent: Turn | None
    told: list[int]
    key: bytes | None = None
    """Of the history that ends with the prompt."""
    is_drift: bool = False
    """There were answers, but the client edited or dropped some of what was said."""

    def ids(self) -> list[int]:
        return [*self.parent.ids(), *self.told] if self.parent is not None else list(self.told)


def chat_prompt(transcript: Transcript, policy: Policy, chat: Chat) -> Prompt:
    """Go on from the turn with the longest known history.

    Raises:
        InvalidInput: The messages cannot be rendered.
    """
    kwargs: dict[str, Any] = {**policy.template_kwargs, **chat.template_kwargs}
    if chat.tools:
        kwargs["tools"] = list(chat.tools)
    keys = history_keys(kwargs, chat.messages)
    count, parent = transcript.find(keys)
    if parent is None:
        return Prompt(None, policy.renderer.first(chat.messages, **kwargs), keys[-1], bool(transcript.turns))
    new = chat.messages[count:]
    told = policy.renderer.after(chat.messages[count - 1], new, **kwargs)
    closing = closing_ids(policy.tokenizer, parent.response.output_tokens)
    return Prompt(parent, closing + told, keys[-1], any(message["role"] == "assistant" for message in new))


def plain_prompt(transcript: Transcript, tokenizer: Tokenizer, text: str | Sequence[int]) -> Prompt:
    """Go on from the turn with the most tokens that a text, or ids, begin with."""
    best: tuple[int, Turn] | None = None
    for turn in transcript.turns.values():
        before = tokenizer.decode(turn.ids()) if isinstance(text, str) else turn.ids()
        if text[: len(before)] == before and (best is None or len(before) > best[0]):
            best = len(before), turn
    parent, rest = (best[1], text[best[0] :]) if best is not None else (None, text)
    if not isinstance(rest, str):
        return Prompt(parent, list(rest))
    return Prompt(parent, tokenizer.encode(rest, add_special_tokens=parent is None) if rest else [])
