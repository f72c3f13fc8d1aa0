"""Sessions: whose key opens what, rewards, ends by agent, owner and time; bounded in number and size."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from gateway_server import TOKEN, Served, openai_client, serve

from headway.gateway.gateway import Access
from headway.testing.scripted_policy import answers, finished

QUESTION: Any = {"role": "user", "content": "six times seven?"}
CONTROL = {"Authorization": f"Bearer {TOKEN}"}


async def post(url: str, key: str, body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


@asynccontextmanager
async def opened(here: Served, **body: Any) -> AsyncIterator[tuple[Any, openai.AsyncOpenAI]]:
    """A session that was opened from outside, and a client of it."""
    status, session = await post(f"{here.url}/v1/sessions", TOKEN, body)
    assert status == 201
    async with openai.AsyncOpenAI(
        base_url=session["openai_base_url"], api_key=session["api_key"], max_retries=0
    ) as client:
        yield session, client


async def ask(client: openai.AsyncOpenAI, *messages: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=[*messages] or [QUESTION])


async def test_the_end_of_a_session_gives_what_was_made_in_it() -> None:
    async with serve(answers("42")) as here, opened(here) as (session, client):
        await ask(client)
        status, state = await post(f"{here.url}/v1/sessions/{session['id']}/end", session["api_key"], {"reward": 1.0})
        assert (status, state["end_reason"], state["reward"]) == (200, "its agent ended it", 1.0)
        (trajectory,) = state["trajectories"]
        assert trajectory["versions"][-3:] == [3, 3, 3]
        assert [v for v, m in zip(trajectory["versions"], trajectory["loss_mask"], strict=True) if not m] == [-1] * (
            len(trajectory["versions"]) - 3
        )
        with pytest.raises(openai.APIStatusError, match="its agent ended it"):
            await ask(client)


async def test_single_answers_have_rewards_of_their_own() -> None:
    async with serve(answers("41", "42")) as here, opened(here) as (session, client):
        first = await ask(client)
        second = await ask(client, QUESTION, first.choices[0].message, QUESTION)
        url = f"{here.url}/v1/sessions/{session['id']}"
        for reply, reward in ((first, -1.0), (second, 1.0)):
            await post(f"{url}/reward", session["api_key"], {"reward": reward, "answer_id": reply.id})
        assert (await post(f"{url}/reward", session["api_key"], {"reward": 1, "answer_id": "x"}))[0] == 404
        _, state = await post(f"{url}/end", session["api_key"])
        assert [trajectory["reward"] for trajectory in state["trajectories"]] == [0.0, 1.0]
        assert [sum(trajectory["loss_mask"]) for trajectory in state["trajectories"]] == [3, 3]


async def test_opening_needs_the_control_token_and_calls_the_sessions_key() -> None:
    async with serve(answers("42", "42")) as here, opened(here) as (session, _), opened(here) as (other, _):
        assert (await post(f"{here.url}/v1/sessions", session["api_key"]))[0] == 401
        for url, key, status in [
            (f"{here.url}/v1", session["api_key"], 200),
            (f"{here.url}/sessions/{session['api_key']}/v1", "", 200),
            (f"{here.url}/sessions/{session['id']}/v1", "", 401),
            (f"{here.url}/sessions/{session['id']}/v1", other["api_key"], 401),
            (f"{here.url}/v1", TOKEN, 401),
            (f"{here.url}/v1", session["id"], 401),
        ]:
            body = {"model": "m", "messages": [QUESTION]}
            assert (await post(f"{url}/chat/completions", key, body))[0] == status, url
        assert (await post(f"{here.url}/v1/sessions/{session['id']}/end", other["api_key"]))[0] == 401


async def test_an_unknown_key_has_openais_error() -> None:
    async with serve(answers()) as here, openai_client(Access(here.url, "s-none", "sk-none")) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await ask(client)
        assert refused.value.code == "invalid_api_key"


async def test_sessions_from_outside_are_bounded_in_number() -> None:
    async with serve(answers(), max_outside=2) as here, opened(here) as (first, _), opened(here):
        status, problem = await post(f"{here.url}/v1/sessions", TOKEN)
        assert (status, problem["status"]) == (429, 429)
        await post(f"{here.url}/v1/sessions/{first['id']}/end", first["api_key"])
        assert (await post(f"{here.url}/v1/sessions", TOKEN))[0] == 201


async def test_a_session_left_open_ends_by_its_time_and_says_so() -> None:
    async with serve(answers("42")) as here:
        here.engine.hold()
        _, access = await here.open(timeout_s=0.2)
        async with openai_client(access) as client:
            with pytest.raises(openai.APIStatusError, match=r"left open for 0\.2 s") as ended:
                await ask(client)
        assert ended.value.status_code == 410
        assert here.gateway.sessions.num_open == 0


async def test_the_end_of_a_session_withdraws_what_runs() -> None:
    async with serve(answers("42")) as here:
        here.engine.hold()
        session, access = await here.open()
        async with openai_client(access) as client:
            calling = asyncio.ensure_future(ask(client))
            await here.engine.until(lambda engine: len(engine.requests) == 1)
            here.gateway.sessions.end(session, "its episode was cancelled")
            with pytest.raises(openai.APIStatusError, match="its episode was cancelled"):
                await calling
        assert here.engine.num_withdrawn == 1


async def test_a_body_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout_controller.gateway_http.MAX_BODY_BYTES", 1000)
    async with serve(answers()) as here, openai_client((await here.open())[1]) as client:
        with pytest.raises(openai.APIStatusError, match="larger than 1000 bytes"):
            await ask(client, {"role": "user", "content": "x" * 2000})


async def test_the_state_of_an_open_session_can_be_seen() -> None:
    async with serve(answers("42")) as here, opened(here) as (session, client):
        await ask(client)
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        url = f"{here.url}/v1/sessions/{session['id']}"
        async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as reply:
            state = await reply.json()
        assert (state["end_reason"], len(state["trajectories"]), len(state["answer_ids"])) == ("", 1, 1)


async def test_five_hundred_sessions_at_once() -> None:
    async def episode(here: Served, client: openai.AsyncOpenAI) -> int:
        session, access = await here.open()
        own = client.with_options(base_url=access.openai_url, api_key=access.api_key)
        first = await ask(own)
        await ask(own, QUESTION, first.choices[0].message, QUESTION)
        here.gateway.sessions.end(session, "done")
        return len(session.trajectories(1.0))

    async with serve(lambda request: finished("42")) as here:
        async with openai.AsyncOpenAI(base_url=here.url, api_key="none", max_retries=0) as client:
            made = await asyncio.gather(*(episode(here, client) for _ in range(500)))
        assert made == [1] * 500
        assert here.gateway.sessions.num_open == 0
