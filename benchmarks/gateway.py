"""What the gateway costs: a scripted policy asked directly and through HTTP, one call at a time; and 500 sessions at
once, each with three turns of its own.
    python benchmarks/gateway.py [--sessions 500] [--calls 400]

Calls alternate, so that both see the same machine. The client is aiohttp on the same loop and core; what it costs by
itself is measured against a route that does nothing, and shown beside.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
from fastapi import FastAPI

from headway.gateway.calls import Chat
from headway.gateway.gateway import Access, Gateway
from headway.gateway.policy import Policy
from headway.gateway.render import ChatRenderer
from headway.runtime.http_server import serve_http
from headway.testing.scripted_policy import CharacterTokenizer, ScriptedPolicy, finished
from headway.workflow import GenerationHyperparameters, ModelRequest
from services.rollout_controller.gateway_chat import chat_router

PROMPT = "x" * 1000
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
TURNS = 3
ANSWER = "word " * 40


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Gateway, Policy]]:
    """The gateway's routes over a policy that answers at once, and `/nothing`."""
    tokenizer = CharacterTokenizer()
    policy = Policy(
        ScriptedPolicy(lambda request: finished(ANSWER)),
        GenerationHyperparameters(max_new_tokens=10**6),
        tokenizer,
        ChatRenderer(tokenizer),
    )
    gateway, app = Gateway(), FastAPI()
    app.include_router(chat_router(gateway))

    @app.get("/nothing")
    async def nothing() -> dict[str, str]:
        return {}

    async with serve_http(cast(Any, app), "127.0.0.1", 0, grace_s=0) as port:
        gateway.serve_at(f"http://127.0.0.1:{port}")
        yield gateway, policy
        await gateway.close()


async def post(http: aiohttp.ClientSession, access: Access, messages: list[Any]) -> Any:
    headers = {"Authorization": f"Bearer {access.api_key}"}
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    async with http.post(f"{access.openai_url}/chat/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        return (await reply.json())["choices"][0]["message"]


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds of a call."""
    began = time.perf_counter()
    await call()
    return (time.perf_counter() - began) * 1e3


async def overhead(calls: int) -> None:
    """The latency of single calls."""
    async with served() as (gateway, policy), aiohttp.ClientSession() as http:
        _, access = await gateway.open(policy, 600)
        ids = policy.renderer.first([{"role": "user", "content": PROMPT}], tools=TOOLS)
        messages = [{"role": "user", "content": PROMPT}]

        async def direct() -> None:
            await policy.engine.agenerate(ModelRequest(input_ids=ids, gconfig=policy.gconfig))

        async def without_http() -> None:
            session, _ = await gateway.open(policy, 600)
            await session.answer(Chat(messages, TOOLS), "a")
            gateway.sessions.end(session, "done")

        async def through_http() -> None:
            session, access = await gateway.open(policy, 600)
            await post(http, access, messages)
            gateway.sessions.end(session, "done")

        async def nothing() -> None:
            async with http.get(f"{access.url}/nothing") as reply:
                await reply.read()

        ways = {"direct": direct, "session": without_http, "http": through_http, "empty http": nothing}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(calls):
            for name, call in ways.items():
                times[name].append(await timed(call))
    for name, values in times.items():
        cuts = statistics.quantiles(values, n=100)
        print(f"{name:>10}  p50 {cuts[49]:6.2f} ms  p95 {cuts[94]:6.2f} ms")
    print(f"overhead of a call  p50 {statistics.median(times['http']) - statistics.median(times['direct']):.2f} ms")


async def concurrent(sessions: int) -> None:
    """Many sessions at once."""
    async with served() as (gateway, policy):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            latencies: list[float] = []

            async def episode(number: int) -> int:
                session, access = await gateway.open(policy, 600)
                messages: list[Any] = []
                for turn in range(TURNS):
                    messages.append({"role": "user", "content": f"{number}/{turn} {PROMPT}"})
                    began = time.perf_counter()
                    messages.append(await post(http, access, messages))
                    latencies.append((time.perf_counter() - began) * 1e3)
                gateway.sessions.end(session, "done")
                return len(session.trajectories(1.0))

            began, cpu = time.perf_counter(), time.process_time()
            made = await asyncio.gather(*(episode(number) for number in range(sessions)))
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
    calls = sessions * TURNS
    print(
        f"{sessions} sessions at once, {TURNS} turns each: {calls} calls in {took:.2f} s ({calls / took:.0f}/s), "
        f"{cpu / calls * 1e3:.2f} ms of CPU a call with its client, p50 {statistics.median(latencies):.0f} ms, "
        f"errors 0, one branch each: {made == [1] * sessions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--calls", type=int, default=400)
    arguments = parser.parse_args()
    asyncio.run(overhead(arguments.calls))
    asyncio.run(concurrent(arguments.sessions))


if __name__ == "__main__":
    main()
