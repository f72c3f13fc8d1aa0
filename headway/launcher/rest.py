"""Ask a service's HTTP API."""

import asyncio
import contextlib
import time
from typing import Any

import aiohttp

from headway.errors import TimedOut, Unavailable

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.1


async def fetch(url: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Unavailable: Nothing answers there, or not with JSON.
    """
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CALL_TIMEOUT_S)) as http, http.get(url) as reply:
            reply.raise_for_status()
            found: dict[str, Any] = await reply.json(content_type=None)
            return found
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"{url} does not answer: {error}") from error


async def answers(url: str, timeout_s: float) -> None:
    """Wait until a URL answers.

    Raises:
        TimedOut: It did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(Unavailable):
            await fetch(url)
            return
        await asyncio.sleep(RETRY_S)
    raise TimedOut(f"{url} did not answer within {timeout_s:.0f} s")
