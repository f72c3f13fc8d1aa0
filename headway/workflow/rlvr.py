"""One question, one answer, one verifiable reward."""

from typing import Any

from headway.config.rollout import GenerationHyperparameters
from headway.core.trajectory import Trajectory
from headway.workflow.api import InferenceEngine, ModelRequest, RewardFunction, RolloutWorkflow, Tokenizer
from headway.workflow.prompts import PromptEncoder
from headway.workflow.sequence import TokenSequence


class RLVRWorkflow(RolloutWorkflow):
    """Generates one completion for a row's `messages` or `prompt`, and scores it with the whole row."""

    def __init__(
        self,
        reward_fn: RewardFunction,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        enable_thinking: bool | None = None,
    ) -> None:
        """`enable_thinking` goes to the chat template; None leaves it to the template."""
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._reward_fn = reward_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer, thinking)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        prompt_ids, prompt = self._prompts.encode(data)
        response = await engine.agenerate(
            ModelRequest(input_ids=prompt_ids, gconfig=self._gconfig, tokenizer=self._tokenizer)
        )
        completion = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self._reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)
        sequence = TokenSequence()
        sequence.add_prompt(prompt_ids)
        sequence.add_response(response)
        return sequence.trajectory(float(reward))
