"""Several tries at one question: after a wrong answer the model is told so and answers again.

    prompt -> answer -> reward > 0 ? end : "wrong, try again" -> answer -> ...        at most `max_turns` answers

The episode is one sequence: every answer carries gradient, everything between the answers has mask 0 and version -1.
Its reward is that of the last answer times `turn_discount` for each turn before it. `gconfig.max_new_tokens` is the
budget of the whole episode: each answer may use what is left of it.
"""

from typing import Any

from headway.config.rollout import GenerationHyperparameters
from headway.core.trajectory import Trajectory
from headway.errors import InvalidInput
from headway.workflow.api import (
    InferenceEngine,
    ModelResponse,
    RewardFunction,
    RolloutWorkflow,
    Tokenizer,
)
from headway.workflow.conversation import Conversation
from headway.workflow.prompts import PromptEncoder, template_ids

TRY_AGAIN = (
    "Your answer is either wrong or not parsable to the reward function. You may misunderstand the original question. "
    "Please carefully read the original question, check the previous errors, and try to answer it again."
)


class MultiTurnWorkflow(RolloutWorkflow):
    """Turns until the reward is positive, `max_turns` are over, or the budget is used up."""

    def __init__(
        self,
        reward_fn: RewardFunction,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        max_turns: int = 3,
        turn_discount: float = 1.0,
        try_again: str = TRY_AGAIN,
    ) -> None:
        if max_turns < 1:
            raise InvalidInput(f"max_turns is {max_turns}; an episode has at least one turn")
        self._reward_fn = reward_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._prompts = PromptEncoder(tokenizer)
        self._try_again_ids = turn_ids(tokenizer, {"role": "user", "content": try_again})

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        conversation = Conversation(engine, self._gconfig, self._tokenizer)
        question, _ = self._prompts.encode(data)
        reward, turns = 0.0, 0
        while reward <= 0 and turns < self._max_turns:
            response = await conversation.answer_to(question)
            if response is None:
                break
            reward = await self._reward(response, data)
            question = self._next_question(response)
            turns += 1
        discounted = reward * self._turn_discount ** (turns - 1)
        return conversation.sequence.trajectory(discounted, {"num_turns": float(turns)})

    async def _reward(self, response: ModelResponse, data: dict[str, Any]) -> float:
        prompt = self._tokenizer.decode(response.input_tokens)
        completion = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        return float(await self._reward_fn(prompt, completion, response.input_tokens, response.output_tokens, **data))

    def _next_question(self, response: ModelResponse) -> list[int]:
        """What follows a wrong answer: its end, where the model did not write one, and the request to try again."""
        end = self._tokenizer.eos_token_id
        if end is None or response.output_tokens[-1:] == [end]:
            return self._try_again_ids
        return [end, *self._try_again_ids]


def turn_ids(tokenizer: Tokenizer, message: dict[str, Any]) -> list[int]:
    """What a chat template writes after a finished answer for one more message, up to the next answer's start.

    Found as the difference between a conversation without and with the message: no answer is ever encoded again.
    A newline that the template writes after the end token belongs to them.

    Raises:
        InvalidInput: The template rewrites what came before; it cannot be used for several turns.
    """
    answered = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    before = template_ids(tokenizer, answered)
    after = template_ids(tokenizer, [*answered, message], add_generation_prompt=True)
    end = _end_of_answer(before, tokenizer.eos_token_id)
    if after[:end] != before[:end]:
        raise InvalidInput("the tokenizer's chat template rewrites earlier turns when one is added")
    return after[end:]


def _end_of_answer(ids: list[int], eos: int | None) -> int:
    """Where the last answer ends: after its end token, where the template writes one."""
    if eos is None or eos not in ids:
        return len(ids)
    return len(ids) - ids[::-1].index(eos)
