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
from headway.workflow.prompts import PromptEncoder
from headway.workflow.turns import closing_ids, turn_ids

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
        self._try_again_ids = turn_ids(tokenizer, [{"role": "user", "content": try_again}])

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
        return [*closing_ids(self._tokenizer, response.output_tokens), *self._try_again_ids]
