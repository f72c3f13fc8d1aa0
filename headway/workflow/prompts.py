"""From a dataset row to the token ids of its prompt; the samples of a group share the work."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from headway.errors import InvalidInput
from headway.workflow.api import Tokenizer

CACHE_SIZE = 4096


class PromptEncoder:
    """Encodes rows with `messages` (by the chat template) or `prompt` (as it is); remembers the last few thousand."""

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._cache: OrderedDict[str | bytes, tuple[list[int], str]] = OrderedDict()

    def encode(self, data: Mapping[str, Any]) -> tuple[list[int], str]:
        """The prompt's token ids (a new list) and its text, as decoded from them.

        Raises:
            InvalidInput: The row has neither `messages` nor `prompt`, or they are empty.
        """
        key = self._key(data)
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = self._encode(data)
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        ids, text = known
        return ids.copy(), text

    @staticmethod
    def _key(data: Mapping[str, Any]) -> str | bytes:
        messages, prompt = data.get("messages"), data.get("prompt")
        if messages:
            return orjson.dumps(messages, option=orjson.OPT_SERIALIZE_NUMPY)
        if isinstance(prompt, str) and prompt:
            return prompt
        raise InvalidInput(f"a row needs `messages` or `prompt`, not empty; it has {sorted(data)}")

    def _encode(self, data: Mapping[str, Any]) -> tuple[list[int], str]:
        if data.get("messages"):
            ids = template_ids(self._tokenizer, data["messages"], add_generation_prompt=True, **self._template_kwargs)
        else:
            ids = list(self._tokenizer.encode(data["prompt"]))
        if not ids:
            raise InvalidInput("the prompt of a row is encoded to no tokens")
        return ids, self._tokenizer.decode(ids)


def template_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template, whichever form the tokenizer returns them in."""
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, **kwargs)
    ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
    return [int(token) for token in ids]
