"""Several turns of one episode: what the model is told goes in as token ids, its answers stay as they were generated.

The budget of the episode is `gconfig.max_new_tokens` over all answers. The episode simply ends when budget or context
are used up; only a first prompt that does not fit is an error.
"""

from headway.config.rollout import GenerationHyperparameters
from headway.workflow.api import InferenceEngine, ModelRequest, ModelResponse, Tokenizer
from headway.workflow.errors import PromptTooLong
from headway.workflow.sequence import TokenSequence


class Conversation:
    """One episode's token sequence, and the engine that continues it."""

    def __init__(self, engine: InferenceEngine, gconfig: GenerationHyperparameters, tokenizer: Tokenizer) -> None:
        self.sequence = TokenSequence()
        self._engine = engine
        self._gconfig = gconfig
        self._tokenizer = tokenizer

    @property
    def budget(self) -> int:
        """Tokens that may still be generated."""
        return self._gconfig.max_new_tokens - self.sequence.num_generated

    async def answer_to(self, ids: list[int], *, tool_call_stops: tuple[str | int, ...] = ()) -> ModelResponse | None:
        """Tell the model more, and take in its answer; None when budget or context leave no room for one.

        What was told stays out of the sequence when there is no answer.

        Raises:
            PromptTooLong: The first prompt leaves no room.
        """
        if self.budget == 0:
            return None
        request = ModelRequest(
            input_ids=self.sequence.ids + ids,
            gconfig=self._gconfig.model_copy(update={"max_new_tokens": self.budget}),
            tokenizer=self._tokenizer,
            tool_call_stops=tool_call_stops,
        )
        try:
            response = await self._engine.agenerate(request)
        except PromptTooLong:
            if not self.sequence.ids:
                raise
            return None
        self.sequence.add_prompt(ids)
        self.sequence.add_response(response)
        return response
