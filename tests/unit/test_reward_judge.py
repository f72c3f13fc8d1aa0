"""A judge is asked within its rate, asked again when it is busy, and never made up."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.reward import judge as judging
from headway.reward.judge import Judge, JudgeSettings, RateLimit, judge, judge_settings
from headway.reward.outcome import Abstain


class Endpoint:
    """Answers with what it is told to, in order; the last one for ever."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        status, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response({"choices": [{"message": {"content": text}}]}, status=status)


@asynccontextmanager
async def asking(endpoint: Endpoint, **settings: Any) -> AsyncIterator[Judge]:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    asked = Judge(JudgeSettings(base_url=f"http://127.0.0.1:{port}/v1", model="m", **settings))
    try:
        yield asked
    finally:
        await asked.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "FIRST_PAUSE_S", 0.001)


async def test_the_number_in_the_reply_is_the_reward() -> None:
    endpoint = Endpoint((200, "I give it a 7"))
    async with asking(endpoint) as asked:
        assert await judge("2+2?", "4", "4", endpoint=asked) == 0.7
    [request] = endpoint.requests
    assert request["temperature"] == 0
    assert "<response>\n4\n</response>" in request["messages"][0]["content"]
    assert endpoint.keys == [None]


async def test_a_busy_judge_is_asked_again() -> None:
    endpoint = Endpoint((429, ""), (503, ""), (200, "10"))
    async with asking(endpoint) as asked:
        assert await asked.score("p", "c") == 1.0
    assert len(endpoint.requests) == 3


async def test_a_judge_that_stays_busy_is_unavailable() -> None:
    endpoint = Endpoint((503, ""))
    async with asking(endpoint, retries=2) as asked:
        with pytest.raises(Unavailable, match="the judge failed 3 times: _Busy: HTTP 503"):
            await asked.score("p", "c")


async def test_a_refusal_is_final() -> None:
    endpoint = Endpoint((401, "no key"))
    async with asking(endpoint) as asked:
        with pytest.raises(HeadwayError, match="the judge refused: 401"):
            await asked.score("p", "c")
    assert len(endpoint.requests) == 1


async def test_a_reply_without_a_number_abstains() -> None:
    async with asking(Endpoint((200, "very good"))) as asked:
        with pytest.raises(Abstain, match="replied without a number: 'very good'"):
            await asked.score("p", "c")


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint((200, "5"))
    async with asking(endpoint, api_key_env="JUDGE_KEY") as asked:
        with pytest.raises(InvalidInput, match="JUDGE_KEY is not set"):
            await asked.score("p", "c")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        await asked.score("p", "c")
    assert endpoint.keys == ["Bearer secret"]


def test_requests_start_evenly() -> None:
    limit = RateLimit(per_minute=120)
    assert [limit.reserve(now) for now in (0.0, 0.0, 0.0, 10.0)] == [0.0, 0.5, 1.0, 0.0]
    assert RateLimit(per_minute=0).reserve(5.0) == 0.0


@pytest.mark.parametrize("arguments", [{}, {"base_url": "x"}, {"base_url": "x", "model": "m", "temprature": 1}])
def test_settings_that_do_not_fit_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"reward\.kwargs of `judge`"):
        judge_settings(arguments)
