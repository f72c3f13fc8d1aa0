"""When two histories are the same: equal in what the model was told and said, however a client writes it.

A client gets an answer as text and sends it back with the next question. It may write the arguments of a tool call
with other spaces, drop white space at the end of an answer, or leave out ids and fields that are null; that is still
the same history. Anything else is an edit.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from headway.errors import InvalidInput

Message = Mapping[str, Any]
"""As chat templates take it: `role`, `content` (a text), and `tool_calls`, `tool_call_id`, `name` where they exist.
The arguments of a call are a dict where they are JSON, else the text as it is."""
KEY_BYTES = 16


def history_keys(about: Any, messages: Sequence[Message]) -> list[bytes]:
    """A key for each beginning of a conversation: element k names the first k messages.

    Args:
        about: What else the rendering depends on, JSON-able: the tools, arguments of the template.

    Example:
        >>> said = {"role": "assistant", "content": "42"}
        >>> history_keys(None, [said])[1] == history_keys(None, [{**said, "content": "42 "}])[1]
        True
    """
    keys = [digest_of(about)]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def next_key(key: bytes, message: Message) -> bytes:
    """The key of a conversation with one more message."""
    return digest_of(_canonical(message), key)


def digest_of(value: Any, before: bytes = b"") -> bytes:
    """A name for a JSON-able value, the same for dicts in another order.

    Raises:
        InvalidInput: It is not JSON-able: an integer of more than 64 bits, half a surrogate pair.
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise InvalidInput(f"the messages or tools cannot be written as JSON: {error}") from error
    return blake2b(before + text, digest_size=KEY_BYTES).digest()


def _canonical(message: Message) -> list[Any]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    return [message["role"], content.strip() if message["role"] == "assistant" else content, message.get("name"), calls]
