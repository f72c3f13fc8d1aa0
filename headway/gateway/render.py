"""From messages to token ids: the whole conversation once, and then only what is new.

What was rendered is remembered for a while, as the samples of a group begin with the same prompt.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import orjson

from headway.errors import InvalidInput
from headway.gateway.history import Message
from headway.workflow.api import Tokenizer
from headway.workflow.prompts import template_ids
from headway.workflow.turns import ANSWER, turn_ids

CACHE_SIZE = 1024


class ChatRenderer:
    """Renders with a tokenizer's chat template. One serves all sessions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[bytes, list[int]] = OrderedDict()

    def first(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """The ids of a conversation up to where the answer begins.

        Raises:
            InvalidInput: The template refuses the messages.
        """
        return self._cached((), messages, kwargs)

    def after(self, answer: Message, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """The ids that follow an answer, which is not rendered, for the messages after it.

        Raises:
            InvalidInput: The template refuses the messages, or rewrites earlier ones.
        """
        calls = answer.get("tool_calls")
        stand_in = {"role": "assistant", "content": "", "tool_calls": calls} if calls else ANSWER
        return self._cached((stand_in,), messages, kwargs)

    def _cached(self, answer: Sequence[Message], messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[int]:
        key = orjson.dumps((answer, messages, kwargs))
        known = self._cache.pop(key, None)
        self._cache[key] = ids = known if known is not None else self._rendered(answer, messages, kwargs)
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return ids

    def _rendered(self, answer: Sequence[Message], messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[int]:
        try:
            if answer:
                return turn_ids(self._tokenizer, messages, answer[0], **kwargs)
            return template_ids(self._tokenizer, messages, add_generation_prompt=True, **kwargs)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidInput(f"the chat template refuses the messages: {error}") from error
