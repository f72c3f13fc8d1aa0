"""One session: an agent's calls, the tokens that answered them, its reward, and its end.

A call runs until it is answered, its client goes, or the session ends: then its request to the engine is withdrawn.
Memory is bounded: so many turns, so many tokens; a call beyond is refused like one for which the context is too short.
"""

import asyncio
import contextvars
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from headway.core.trajectory import Trajectory
from headway.errors import HeadwayError, NotFound
from headway.gateway.calls import Answer, Chat, message_of
from headway.gateway.errors import SessionEnded
from headway.gateway.history import next_key
from headway.gateway.policy import Limits, Policy
from headway.gateway.prompting import Prompt, chat_prompt, plain_prompt
from headway.gateway.sampling import Asked, combine, cut_at_stop_string
from headway.gateway.tool_calls import Said, ToolCall
from headway.gateway.transcript import Transcript, Turn
from headway.workflow.api import ModelRequest, ModelResponse
from headway.workflow.errors import EvidenceInvalid, PromptTooLong


class Session:
    """An agent's session. Its engine is called in the context in which the session was opened."""

    def __init__(self, policy: Policy, limits: Limits | None = None) -> None:
        self.id = f"s-{secrets.token_hex(16)}"
        self.key = f"sk-headway-{secrets.token_urlsafe(32)}"
        self.policy = policy
        self.transcript = Transcript()
        self.reward: float | None = None
        """Of the whole session."""
        self.turn_rewards: dict[str, float] = {}
        self.end_reason = ""
        """Why it has ended; empty: it is open."""
        self.failure: HeadwayError | None = None
        """Why the last call failed, where that was not the client's mistake."""
        self.num_drifts = 0
        """Calls that continued no turn although there were some: the client edited or dropped history."""
        self._limits = limits or Limits()
        self._context = contextvars.copy_context()
        self._running: set[asyncio.Task[Any]] = set()

    # ---- calls

    async def answer(self, chat: Chat, id: str, count: int = 1) -> list[Answer]:
        """Generate answers to a conversation.

        Args:
            id: Names the first answer; the others are `id:1`, `id:2` and so on.

        Raises:
            InvalidInput: The messages cannot be rendered or answered.
            PromptTooLong: There is no room for an answer.
            SessionEnded: It has ended, or does before the answer is complete.
            HeadwayError: As `InferenceEngine.agenerate` raises them.
        """
        self._check_open()
        prompt = chat_prompt(self.transcript, self.policy, chat)
        self.num_drifts += prompt.is_drift
        turns = await self._generate(prompt, chat.asked, id, count)
        return [self._chat_answer(chat, prompt, turn) for turn in turns]

    async def complete(self, text: str | Sequence[int], asked: Asked, id: str, count: int = 1) -> list[Answer]:
        """Generate completions of a plain text, or of token ids. Raises like `answer`."""
        self._check_open()
        prompt = plain_prompt(self.transcript, self.policy.tokenizer, text)
        turns = await self._generate(prompt, asked, id, count)
        for turn in turns:
            self.transcript.add(turn)
        return [_answer(turn, prompt, *self._text(turn, asked)) for turn in turns]

    def overridden(self, asked: Asked) -> dict[str, Any]:
        """The client's sampling parameters that do not count, as the experiment's do."""
        return combine(self.policy.gconfig, asked, self.policy.rule, 1)[1]

    def count_tokens(self, chat: Chat) -> int:
        """Tokens of the prompt that a call would be answered after."""
        self._check_open()
        return len(chat_prompt(self.transcript, self.policy, chat).ids())

    def token_text(self, token: int) -> str:
        return self.policy.tokenizer.decode([token])

    # ---- rewards, end

    def give_reward(self, reward: float, turn_id: str | None = None) -> None:
        """Set the reward of the whole session, or of one turn; the last one given counts.

        Raises:
            NotFound: There is no such turn.
        """
        if turn_id is None:
            self.reward = reward
        elif turn_id in self.transcript.turns:
            self.turn_rewards[turn_id] = reward
        else:
            raise NotFound(f"session {self.id} has no answer {turn_id!r}: rewards go by the ids of answers")

    def end(self, reason: str) -> None:
        """Answer no calls from now on; those that run are withdrawn. Only the first reason counts."""
        self.end_reason = self.end_reason or reason
        for task in self._running:
            task.cancel()

    def trajectories(self, reward: float, turn_discount: float = 1.0) -> list[Trajectory]:
        """What may be trained on: one trajectory a branch, or one a turn where turns have rewards of their own.

        Args:
            reward: Of the whole session; where turns have rewards, it is added to that of the newest turn.
            turn_discount: Of the return of a turn that has others after it.
        """
        if not self.turn_rewards:
            return list(self.transcript.branches(reward))
        rewards = dict(self.turn_rewards)
        last = next(reversed(self.transcript.turns))
        rewards[last] = rewards.get(last, 0.0) + reward
        return list(self.transcript.single_turns(self.transcript.returns(rewards, turn_discount)))

    # ---- generation

    async def _generate(self, prompt: Prompt, asked: Asked, id: str, count: int) -> list[Turn]:
        """`count` answers to one prompt. They are not yet in the transcript."""
        ids = prompt.ids()
        gconfig, _ = combine(self.policy.gconfig, asked, self.policy.rule, self._budget(prompt, len(ids)))
        tokenizer = self.policy.tokenizer
        requests = [
            ModelRequest(input_ids=ids, gconfig=gconfig, tokenizer=tokenizer, metadata={"session": self.id})
            for _ in range(count)
        ]
        responses = await self._all([self.policy.engine.agenerate(request) for request in requests])
        self.failure = None
        names = [id, *(f"{id}:{number}" for number in range(1, count))]
        return [_turn(name, prompt, ids, response) for name, response in zip(names, responses, strict=True)]

    def _budget(self, prompt: Prompt, num_ids: int) -> int:
        """Tokens that may be generated: `gconfig.max_new_tokens` for all answers of a branch together.

        Raises:
            PromptTooLong: None.
        """
        path = prompt.parent.path() if prompt.parent is not None else []
        budget = self.policy.gconfig.max_new_tokens - sum(turn.response.output_len for turn in path)
        limits, transcript = self._limits, self.transcript
        if budget > 0 and len(transcript.turns) < limits.max_turns and transcript.num_tokens < limits.max_tokens:
            return budget
        error = PromptTooLong(
            f"session {self.id} has no room for another answer: {len(transcript.turns)} answers of {limits.max_turns}, "
            f"{transcript.num_tokens} tokens of {limits.max_tokens}, {budget} left of gconfig.max_new_tokens "
            f"({self.policy.gconfig.max_new_tokens}) after a prompt of {num_ids} tokens"
        )
        self.failure = error
        raise error

    async def _all(self, calls: Sequence[Coroutine[Any, Any, ModelResponse]]) -> list[ModelResponse]:
        """Run calls of the engine at once; none of them is left when this returns or raises."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(call, context=self._context.copy()) for call in calls]
        self._running.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            self._raise_if_ended()
            raise
        except HeadwayError as error:
            self.failure = error
            raise
        finally:
            self._running.difference_update(tasks)
            for task in tasks:
                task.cancel()

    # ---- answers

    def _chat_answer(self, chat: Chat, prompt: Prompt, turn: Turn) -> Answer:
        text, stop_string = self._text(turn, chat.asked)
        names = [tool["function"]["name"] for tool in chat.tools]
        said = self.policy.parser(text, names) if names and chat.calls_tools else Said(text)
        answer = _answer(turn, prompt, said.text, stop_string, said.calls[: chat.max_calls])
        assert prompt.key is not None
        self.transcript.add(turn, next_key(prompt.key, message_of(answer)))
        return answer

    def _text(self, turn: Turn, asked: Asked) -> tuple[str, str | None]:
        text = self.policy.tokenizer.decode(turn.response.output_tokens, skip_special_tokens=True)
        return cut_at_stop_string(text, asked.stop)

    def _check_open(self) -> None:
        if self.end_reason:
            raise SessionEnded(f"session {self.id} has ended: {self.end_reason}")

    def _raise_if_ended(self) -> None:
        """After a cancellation: was it the session's end, and not this caller's own?"""
        caller = asyncio.current_task()
        if self.end_reason and (caller is None or not caller.cancelling()):
            self._check_open()


def _answer(turn: Turn, prompt: Prompt, text: str, stop_string: str | None, calls: Sequence[ToolCall] = ()) -> Answer:
    named = [(f"call_{secrets.token_hex(12)}", call) for call in calls]
    return Answer(turn, len(prompt.ids()), text, named, stop_string)


def _turn(id: str, prompt: Prompt, ids: list[int], response: ModelResponse) -> Turn:
    """The answer as a turn.

    Raises:
        EvidenceInvalid: It is none to this prompt.
    """
    if response.input_tokens != ids:
        raise EvidenceInvalid("the engine's answer does not continue the prompt: its input tokens are others")
    return Turn(id, prompt.parent, tuple(prompt.told), replace(response, input_tokens=[]))
