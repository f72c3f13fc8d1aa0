"""From messages to token ids: the whole conversation once, and then only what is new.

What was rendered is remembered for a while, as the samples of a group begin with the same prompt.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from headway.errors import InvalidInput
from headway.gateway.history import Message, digest_of
from headway.workflow.api import Tokenizer
from headway.workflow.prompts import template_ids
from headway.workflow.turns import ANSWER, turn_ids

MAX_CACHED_TOKENS = 1_000_000


class ChatRenderer:
    """Renders with a tokenizer's chat template. One serves all sessions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[bytes, list[int]] = OrderedDict()
        self._num_cached = 0
        """Tokens in the cache."""

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
        key = digest_of((answer, messages, kwargs))
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return known
        self._cache[key] = ids = self._rendered(answer, messages, kwargs)
        self._num_cached += len(ids)
        while self._num_cached > MAX_CACHED_TOKENS and len(self._cache) > 1:
            self._num_cached -= len(self._cache.popitem(last=False)[1])
        return ids

    def _rendered(self, answer: Sequence[Message], messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[int]:
        try:
            if answer:
                return turn_ids(self._tokenizer, messages, answer[0], **kwargs)
            return template_ids(self._tokenizer, messages, add_generation_prompt=True, **kwargs)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidInput(f"the chat template refuses the messages: {error}") from error
