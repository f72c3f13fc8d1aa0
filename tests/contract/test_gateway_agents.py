"""Agents as episodes: a function or a command behind a URL; rewards, time limits, failures; no process is left."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from gateway_server import Served, serve

from headway.core.trajectory import Trajectory
from headway.errors import InvalidInput, TimedOut
from headway.gateway.gateway import Access
from headway.testing.scripted_policy import CharacterTokenizer, answers
from headway.workflow.agent import AgentWorkflow
from headway.workflow.agent_command import CommandFailed
from headway.workflow.errors import PromptTooLong, ServerLost

ROW = {"question": "six times seven?", "answer": "42"}
HERE = "test_gateway_agents"
SCRIPT = """
import json, sys
from openai import OpenAI
row = json.load(sys.stdin)
client = OpenAI()
messages = [{"role": "user", "content": row["question"]}]
print(client.chat.completions.create(model="gpt-x", messages=messages).choices[0].message.content)
"""


async def score_row(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], /, **data: Any
) -> float:
    assert prompt.startswith("<user>")
    return float(data["answer"] == completion)


def workflow(here: Served, **kwargs: Any) -> AgentWorkflow:
    gconfig = here.policy.gconfig
    return AgentWorkflow(score_row, gconfig, CharacterTokenizer(), here.gateway, **kwargs)


async def run(here: Served, agent: Any, **kwargs: Any) -> list[Trajectory]:
    made = await workflow(here, agent=f"{HERE}.{agent.__name__}", **kwargs).arun_episode(here.engine, dict(ROW))
    assert here.gateway.sessions.num_open == 0
    return made


async def ask(client: openai.AsyncOpenAI, *messages: Any) -> Any:
    question = {"role": "user", "content": ROW["question"]}
    return await client.chat.completions.create(model="gpt-x", messages=[question, *messages])


# ---- agents


async def rewarding(data: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    return float((await ask(client)).choices[0].message.content == data["answer"])


async def leaving_it_to_others(client: openai.AsyncOpenAI) -> None:
    await ask(client)


async def given_by_a_call(client: openai.AsyncOpenAI, access: Access) -> None:
    await ask(client)
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{access.session_url}/end", json={"reward": 0.75}) as reply:
            assert reply.status == 200


async def rewarding_each(client: openai.AsyncOpenAI) -> dict[str, float]:
    first = await ask(client)
    second = await ask(client, first.choices[0].message, {"role": "user", "content": "Sure?"})
    return {first.id: 0.25, second.id: 1.0}


async def silent() -> float:
    return 1.0


async def endless(client: openai.AsyncOpenAI) -> None:
    await ask(client)


class WithRun:
    """An agent as AReaL's workflows have it."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        async with openai.AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"]) as client:
            return float((await ask(client)).choices[0].message.content == data["answer"])


def not_async(data: dict[str, Any]) -> float:
    return 0.0


async def asking_for_too_much(data: dict[str, Any], budget: int) -> float:
    return 0.0


# ---- rewards


@pytest.mark.parametrize(
    ("agent", "reward"),
    [(rewarding, 1.0), (leaving_it_to_others, 1.0), (given_by_a_call, 0.75), (WithRun, 1.0)],
)
async def test_the_reward_is_the_agents_or_the_sessions_or_the_functions(agent: Any, reward: float) -> None:
    async with serve(answers("42")) as here:
        (trajectory,) = await run(here, agent)
        assert trajectory.reward == reward
        assert trajectory.metrics == {"num_turns": 1.0, "num_answers": 1.0, "num_drifts": 0.0}
        assert trajectory.versions[trajectory.loss_mask].tolist() == [3, 3, 3]


async def test_single_answers_are_rewarded_by_their_ids() -> None:
    async with serve(answers("41", "42")) as here:
        made = await run(here, rewarding_each, turn_discount=0.5)
        assert [trajectory.reward for trajectory in made] == [0.25 + 0.5 * 1.0, 1.0]


async def test_many_episodes_at_once_do_not_mix() -> None:
    def echo(request: Any) -> str:
        return CharacterTokenizer().decode(request.input_ids[6:9]) + "\x02"

    async def one(flow: AgentWorkflow, here: Served, number: int) -> float:
        row = {"question": f"{number:03d}?", "answer": f"{number:03d}"}
        (made,) = await flow.arun_episode(here.engine, row)
        return made.reward

    async with serve(echo) as here:
        flow = workflow(here, agent=f"{HERE}.echoing")
        assert await asyncio.gather(*(one(flow, here, number) for number in range(100))) == [1.0] * 100


async def echoing(data: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages: Any = [{"role": "user", "content": data["question"]}]
    reply = await client.chat.completions.create(model="m", messages=messages)
    return float(reply.choices[0].message.content == data["answer"])


# ---- failures


async def test_an_agent_that_takes_too_long_is_ended_with_its_reason() -> None:
    async with serve(answers("42")) as here:
        here.engine.hold()
        with pytest.raises(TimedOut, match=r"longer than 0\.2 s"):
            await run(here, endless, timeout_s=0.2)
        assert here.gateway.sessions.num_open == 0


async def test_a_cancelled_episode_withdraws_its_requests() -> None:
    async with serve(answers("42")) as here:
        here.engine.hold()
        running = asyncio.ensure_future(run(here, endless))
        await here.engine.until(lambda engine: len(engine.requests) == 1)
        running.cancel()
        await asyncio.wait({running})
        await here.engine.until(lambda engine: engine.num_withdrawn == 1)
        assert here.gateway.sessions.num_open == 0


async def test_lost_engines_end_the_episode_as_lost_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(answers(*[ServerLost("all are gone")] * 3)) as here:
        with pytest.raises(ServerLost, match="all are gone"):
            await run(here, leaving_it_to_others)


async def test_a_policy_that_ran_out_of_room_has_the_overflow_reward() -> None:
    async with serve(answers("41", PromptTooLong("full"))) as here:
        (trajectory,) = await run(here, rewarding_each, overflow_reward=-0.5)
        assert trajectory.reward == -0.5


async def test_a_first_prompt_that_does_not_fit_is_an_error() -> None:
    async with serve(answers(PromptTooLong("full"))) as here:
        with pytest.raises(PromptTooLong, match="full"):
            await run(here, rewarding)


async def test_an_agent_that_never_asks_is_a_mistake() -> None:
    async with serve(answers()) as here:
        with pytest.raises(InvalidInput, match="without a single answer"):
            await run(here, silent)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({}, "either an `agent`"),
        ({"agent": f"{HERE}.not_async"}, "neither an async function"),
        ({"agent": f"{HERE}.asking_for_too_much"}, "asks for budget"),
        ({"command": ["no-such-program"]}, "no-such-program"),
        ({"agent": f"{HERE}.silent", "tool_parser": "xml"}, "hermes"),
        ({"agent": f"{HERE}.silent", "sampling": "mine"}, "experiment or client"),
    ],
)
async def test_a_mistake_in_the_file_is_told_at_once(kwargs: dict[str, Any], named: str) -> None:
    async with serve(answers()) as here:
        with pytest.raises(InvalidInput, match=named):
            workflow(here, **kwargs)


# ---- commands


async def run_command(here: Served, *command: str, **kwargs: Any) -> list[Trajectory]:
    return await workflow(here, command=[*command], **kwargs).arun_episode(here.engine, dict(ROW))


async def test_a_command_with_the_unchanged_client_is_an_episode() -> None:
    async with serve(answers("42")) as here:
        (trajectory,) = await run_command(here, sys.executable, "-c", SCRIPT)
        assert trajectory.reward == 1.0
        assert here.gateway.sessions.num_open == 0


async def test_a_command_that_fails_tells_how() -> None:
    async with serve(answers("42")) as here:
        with pytest.raises(CommandFailed, match="ended with 3: no luck"):
            await run_command(here, "sh", "-c", "echo no luck; exit 3")


async def test_a_command_knows_its_session_and_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HEADWAY_API_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "secret-of-ours")
    async with serve(answers()) as here:
        with pytest.raises(InvalidInput, match="without a single answer"):
            await run_command(here, "sh", "-c", f"env > {tmp_path}/env; cat > {tmp_path}/row", env={"MORE": "1"})
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert "secret-of-ours" not in seen.values()
    assert seen["OPENAI_BASE_URL"] == f"{seen['ANTHROPIC_BASE_URL']}/v1"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"]
    assert seen["MORE"] == "1"
    assert "six times seven?" in (tmp_path / "row").read_text()


@pytest.mark.parametrize("how", ["time limit", "cancelled"])
async def test_no_process_of_a_command_is_left(how: str, tmp_path: Path) -> None:
    async with serve(answers()) as here:
        command = f"sleep 1000 & echo $! > {tmp_path}/child.part; mv {tmp_path}/child.part {tmp_path}/child; wait"
        limit_s = 2.0 if how == "time limit" else 600.0
        running = asyncio.ensure_future(run_command(here, "sh", "-c", command, timeout_s=limit_s))
        child = await number_in(tmp_path / "child", running)
        if how == "cancelled":
            running.cancel()
        await asyncio.wait({running})
        assert running.cancelled() or isinstance(running.exception(), TimedOut)
        await gone(child)


async def number_in(path: Path, running: "asyncio.Future[Any]") -> int:
    """The number that another process writes."""
    while not (found := await asyncio.to_thread(_read, path)):
        assert not running.done(), running
    return int(found)


async def gone(pid: int) -> None:
    """Wait until a process has ended; one that is only not reaped yet has."""
    async with asyncio.timeout(10):
        while (stat := await asyncio.to_thread(_read, Path(f"/proc/{pid}/stat"))) and ") Z" not in stat:  # noqa: ASYNC110
            await asyncio.sleep(0)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
