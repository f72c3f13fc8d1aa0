"""What a chat template writes between two answers of the model: found without encoding any answer again.

... answer <end>|\n<user>and then?<end>\n<assistant>|answer ...
                ^------------- turn_ids -----------^
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import InvalidInput
from headway.workflow.api import Tokenizer
from headway.workflow.prompts import template_ids

QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}


def turn_ids(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any] = ANSWER, **kwargs: Any
) -> list[int]:
    """What a chat template writes after a finished answer for more messages, up to the next answer's start.

    Found in a short conversation: what follows the end token of the answer; a newline there belongs to them. Some
    templates leave the thoughts of an answer out once it is not the last one. That makes no difference: what was
    generated stays.

    Args:
        answer: Stands for the answer; one with `tool_calls` where the messages are what the tools gave.
        kwargs: For the template: `tools` and others.

    Raises:
        InvalidInput: Where the answer ends cannot be found; the template cannot be used for several turns.
    """
    before = template_ids(tokenizer, [QUESTION, answer], **kwargs)
    after = template_ids(tokenizer, [QUESTION, answer, *messages], add_generation_prompt=True, **kwargs)
    end = tokenizer.eos_token_id
    num_ends = before.count(end) if end is not None else 0
    if num_ends == 0 and after[: len(before)] == before:
        return after[len(before) :]
    places = [place for place, token in enumerate(after) if token == end][:num_ends]
    if num_ends == 0 or len(places) < num_ends:
        raise InvalidInput("the tokenizer's chat template rewrites earlier turns when one is added")
    return after[places[-1] + 1 :]


def closing_ids(tokenizer: Tokenizer, output_tokens: Sequence[int]) -> list[int]:
    """The end of an answer, where the model did not write one."""
    end = tokenizer.eos_token_id
    return [] if end is None or list(output_tokens[-1:]) == [end] else [end]
