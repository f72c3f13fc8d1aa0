"""The gateway's routes on a real port, over a policy that answers by a script: what clients are tested against."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import anthropic
import openai
from fastapi import FastAPI

from headway.gateway.gateway import Access, Gateway
from headway.gateway.policy import Limits, Policy
from headway.gateway.render import ChatRenderer
from headway.gateway.sampling import Rule
from headway.gateway.session import Session
from headway.runtime.http_server import serve_http
from headway.testing.scripted_policy import CharacterTokenizer, Script, ScriptedPolicy
from headway.workflow import GenerationHyperparameters
from services.rollout_controller.auth import Access as Control
from services.rollout_controller.gateway_chat import chat_router
from services.rollout_controller.gateway_sessions import session_router
from services.rollout_controller.problems import install_problems

TOKEN = "control-token"


@dataclass
class Served:
    """The gateway, and what answers behind it."""

    gateway: Gateway
    engine: ScriptedPolicy
    url: str
    policy: Policy

    async def open(self, timeout_s: float = 60.0, limits: Limits | None = None) -> tuple[Session, Access]:
        return await self.gateway.open(self.policy, timeout_s, limits)


@asynccontextmanager
async def serve(
    script: Script, *, rule: Rule = Rule.CLIENT, max_outside: int = 4, **gconfig: Any
) -> AsyncIterator[Served]:
    """Serve it on a free port."""
    engine, tokenizer = ScriptedPolicy(script), CharacterTokenizer()
    sampling = GenerationHyperparameters(**{"max_new_tokens": 1000, **gconfig})
    policy = Policy(engine, sampling, tokenizer, ChatRenderer(tokenizer), rule)
    gateway = Gateway(lambda: policy, max_outside)
    app = FastAPI()
    app.state.access = Control(TOKEN)
    install_problems(app)
    app.include_router(session_router(gateway))
    app.include_router(chat_router(gateway))
    async with serve_http(cast(Any, app), "127.0.0.1", 0, grace_s=0) as port:
        gateway.serve_at(f"http://127.0.0.1:{port}")
        try:
            yield Served(gateway, engine, f"http://127.0.0.1:{port}", policy)
        finally:
            await gateway.close()


@asynccontextmanager
async def openai_client(access: Access) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.api_key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_client(access: Access) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url, key = access.anthropic_url, access.api_key
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client
