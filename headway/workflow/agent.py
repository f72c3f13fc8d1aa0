"""Any agent that talks to an OpenAI or Anthropic URL, as a workflow.

    episode begins -> a session of the gateway -> the agent: a function, or a command -> reward -> trajectories
                          base URL and key  ----^   calls models, tools, whatever

What the agent's calls generate is kept as token ids by the gateway; the agent only sees text. The reward is what the
function returns, else what was given to the session, else what the reward function says of the last answer.

An episode always ends: when the agent does, at its time limit, or when it is cancelled; a command's processes are then
gone too. An agent that fails because the engines did ends as they did; one that fails because the policy ran out of
room has `overflow_reward`, as a policy that rambles should learn not to.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from headway.config.rollout import GenerationHyperparameters
from headway.core.trajectory import Trajectory
from headway.errors import InvalidInput, TimedOut
from headway.gateway.gateway import Access, Gateway
from headway.gateway.policy import Limits, Policy
from headway.gateway.render import ChatRenderer
from headway.gateway.sampling import Rule
from headway.gateway.session import Session
from headway.gateway.tool_calls import find_parser
from headway.workflow.agent_command import CommandAgent
from headway.workflow.agent_function import FunctionAgent
from headway.workflow.api import InferenceEngine, RewardFunction, RolloutWorkflow, Tokenizer
from headway.workflow.errors import PromptTooLong

GRACE_S = 60.0
"""A session outlives its episode's time limit by so much: the episode says first why it ends."""
Rewards = float | Mapping[str, float] | None
"""Of the whole episode; or of single answers, by their ids; or left to others."""


class Agent(Protocol):
    """Something that acts by calling models."""

    async def run(self, data: dict[str, Any], access: Access) -> Rewards:
        """Act on one row."""
        ...


class AgentWorkflow(RolloutWorkflow):
    """Runs an agent for each episode.

    Args:
        agent: Import path of an async function of any of `data`, `base_url`, `api_key`, `client` (an `AsyncOpenAI`),
            `access`; or of a class with such a method `run`.
        command: In place of `agent`: a program and its arguments. It gets the row as JSON on its standard input, and
            where the session is from its environment.
        env: Added to the command's environment.
        timeout_s: Longest time of an episode.
        max_processes: Commands that run at once; more wait.
        max_turns: Answers of one episode.
        sampling: `experiment`: the temperature of `gconfig` counts, whatever the agent asks for. `client`: the agent's.
        tool_parser: How the model writes tool calls: `hermes`, `llama3_json`, or the import path of a parser.
        turn_discount: Of the return of an answer that has others after it, where single answers have rewards.
        overflow_reward: Of an episode that failed because there was no room for another answer.
        chat_template_kwargs: Arguments of the chat template, for instance `enable_thinking`.
    """

    def __init__(
        self,
        reward_fn: RewardFunction,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        gateway: Gateway,
        agent: str | None = None,
        command: list[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        max_processes: int = 32,
        max_turns: int = 64,
        sampling: str = "experiment",
        tool_parser: str = "hermes",
        turn_discount: float = 1.0,
        overflow_reward: float = 0.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if (agent is None) == (command is None):
            raise InvalidInput("workflow.kwargs names either an `agent` (an import path) or a `command`")
        if sampling not in list(Rule):
            raise InvalidInput(f"workflow.kwargs.sampling is {sampling!r}; it is {' or '.join(Rule)}")
        self._agent: Agent = (
            FunctionAgent(agent, gateway.when_closed)
            if agent is not None
            else CommandAgent(command or [], env or {}, max_processes)
        )
        self._reward_fn = reward_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._gateway = gateway
        self._renderer = ChatRenderer(tokenizer)
        self._timeout_s = timeout_s
        self._limits = Limits(max_turns=max_turns)
        self._rule = Rule(sampling)
        self._parser = find_parser(tool_parser)
        self._turn_discount = turn_discount
        self._overflow_reward = overflow_reward
        self._template_kwargs = dict(chat_template_kwargs or {})

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        session, access = await self._gateway.open(self._policy(engine), self._timeout_s + GRACE_S, self._limits)
        try:
            rewards = await self._act(session, data, access)
        finally:
            self._gateway.sessions.end(session, "its episode is over")
        return await self._result(session, data, rewards)

    def _policy(self, engine: InferenceEngine) -> Policy:
        return Policy(
            engine, self._gconfig, self._tokenizer, self._renderer, self._rule, self._parser, self._template_kwargs
        )

    async def _act(self, session: Session, data: dict[str, Any], access: Access) -> Rewards:
        """Let the agent act.

        Raises:
            TimedOut: It took too long.
            HeadwayError: Why a call failed, where the agent failed of it.
            Exception: The agent's own.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await self._agent.run(data, access)
        except Exception as error:  # a foreign agent raises what it likes; what it failed of is told
            if isinstance(error, TimeoutError) and limit.expired():
                raise TimedOut(f"the agent took longer than {self._timeout_s:g} s (timeout_s)") from error
            if isinstance(session.failure, PromptTooLong) and session.transcript.turns:
                return self._overflow_reward
            if session.failure is not None:
                raise session.failure from error
            raise

    async def _result(self, session: Session, data: dict[str, Any], rewards: Rewards) -> list[Trajectory]:
        """What is trained on.

        Raises:
            InvalidInput: The agent never got an answer, or its rewards name none.
        """
        if not session.transcript.turns:
            raise InvalidInput("the agent ended without a single answer of the model")
        if isinstance(rewards, Mapping):
            for id, reward in rewards.items():
                session.give_reward(float(reward), id)
        elif rewards is not None:
            session.give_reward(float(rewards))
        if session.reward is None and not session.turn_rewards:
            session.give_reward(await self._score(session, data))
        made = session.trajectories(session.reward or 0.0, self._turn_discount)
        about = {"num_answers": float(len(session.transcript.turns)), "num_drifts": float(session.num_drifts)}
        for trajectory in made:
            trajectory.metrics.update(about)
        return made

    async def _score(self, session: Session, data: dict[str, Any]) -> float:
        """What the reward function says of the newest answer, and of the prompt that its branch begins with."""
        last = session.transcript.leaves()[0]
        prompt_ids, completion_ids = list(last.path()[0].told), last.response.output_tokens
        prompt = self._tokenizer.decode(prompt_ids)
        completion = self._tokenizer.decode(completion_ids, skip_special_tokens=True)
        return float(await self._reward_fn(prompt, completion, prompt_ids, completion_ids, **data))
