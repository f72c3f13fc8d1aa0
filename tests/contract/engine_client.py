"""A plain client of the SGLang contract, for tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

PROMPT = [10, 20, 30, 40, 50]
LONG = {"max_new_tokens": 900, "ignore_eos": True}
"""Sampling parameters of a request that runs for a while."""
DEADLINE_S = 60.0


class Engine:
    """An engine under test."""

    def __init__(self, kind: str, session: aiohttp.ClientSession, models: Path) -> None:
        self.kind = kind
        self.models = models
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls, kind: str, url: str, models: Path) -> AsyncIterator["Engine"]:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            yield cls(kind, session, models)

    async def call(self, method: str, path: str, body: Any = None, data: bytes | None = None) -> tuple[int, Any]:
        """Status, and the body: decoded if it is JSON."""
        async with self._session.request(method, path, json=body, data=data) as response:
            content = await response.read()
            if response.content_type == "application/json":
                return response.status, orjson.loads(content)
            return response.status, content.decode()

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return await self.call("POST", path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.call("GET", path)

    async def generate(self, sampling: dict[str, Any] | None = None, **body: Any) -> Any:
        """The result of a request that must be accepted."""
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling or {}} | body
        status, result = await self.post("/generate", **body)
        assert status == 200, result
        return result

    async def stream(self, sampling: dict[str, Any] | None = None, **body: Any) -> AsyncIterator[Any]:
        """The events of a streaming request; `[DONE]` must come, and is left out."""
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling or {}, "stream": True} | body
        async with self._session.post("/generate", json=body) as response:
            assert response.status == 200
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for line in response.content:
                if line.strip() == b"data: [DONE]":
                    return
                if line.strip():
                    yield orjson.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream ended without [DONE]")

    async def start(self, sampling: dict[str, Any] | None = None, **body: Any) -> "Started":
        """Start a streaming request, and return when its first token is there."""
        started = Started(self.stream(sampling or LONG, **body))
        await started.tokens(1)
        return started

    async def refused(self, status: int = 400, **body: Any) -> Any:
        """The error of a request that must be refused; the engine must still answer afterwards."""
        got, result = await self.post("/generate", **body)
        assert got == status, result
        assert (await self.generate({"max_new_tokens": 1}))["meta_info"]["completion_tokens"] <= 1
        return result

    async def load(self, model: str, **body: Any) -> tuple[int, Any]:
        return await self.post("/update_weights_from_disk", model_path=str(self.models / model), **body)

    async def version(self) -> str:
        _, info = await self.get("/model_info")
        return str(info["weight_version"])

    async def restore(self) -> None:
        """End what runs, and bring back the weights of model `a`."""
        await self.post("/continue_generation")
        await self.post("/abort_request", abort_all=True)
        await self.get("/flush_cache?timeout=20")
        status, answer = await self.load("a", weight_version="default")
        assert status == 200, answer


class Started:
    """A streaming request that runs; collects its events."""

    def __init__(self, events: AsyncIterator[Any]) -> None:
        self.last: Any = None
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._collect(events))

    async def tokens(self, count: int) -> None:
        """Wait for so many tokens."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: self._task.done() or self.count >= count), DEADLINE_S)
        if self._task.done():
            self._task.result()

    async def end(self) -> Any:
        """The last event."""
        await asyncio.wait_for(self._task, DEADLINE_S)
        return self.last

    @property
    def count(self) -> int:
        return len(self.last["output_ids"]) if self.last else 0

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def _collect(self, events: AsyncIterator[Any]) -> None:
        async for event in events:
            async with self._changed:
                self.last = event
                self._changed.notify_all()
        async with self._changed:
            self._changed.notify_all()
