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

    Found as the difference between a short conversation without and with the messages. A newline that the template
    writes after the end token belongs to them.

    Args:
        answer: Stands for the answer; one with `tool_calls` where the messages are what the tools gave.
        kwargs: For the template: `tools` and others.

    Raises:
        InvalidInput: The template rewrites what came before; it cannot be used for several turns.
    """
    before = template_ids(tokenizer, [QUESTION, answer], **kwargs)
    after = template_ids(tokenizer, [QUESTION, answer, *messages], add_generation_prompt=True, **kwargs)
    end = _end_of_answer(before, tokenizer.eos_token_id)
    if after[:end] != before[:end]:
        raise InvalidInput("the tokenizer's chat template rewrites earlier turns when one is added")
    return after[end:]


def closing_ids(tokenizer: Tokenizer, output_tokens: Sequence[int]) -> list[int]:
    """The end of an answer, where the model did not write one."""
    end = tokenizer.eos_token_id
    return [] if end is None or list(output_tokens[-1:]) == [end] else [end]


def _end_of_answer(ids: list[int], eos: int | None) -> int:
    """Where the last answer ends: after its end token, where the template writes one."""
    if eos is None or eos not in ids:
        return len(ids)
    return len(ids) - ids[::-1].index(eos)
