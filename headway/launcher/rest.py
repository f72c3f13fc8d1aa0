"""Ask a service's HTTP API."""

import asyncio
import contextlib
import time
from http import HTTPStatus
from typing import Any

import aiohttp

from headway.config.secrets import secret
from headway.errors import TimedOut, Unavailable
from headway.launcher.token import VARIABLE

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.1


async def fetch(url: str, token: str | None = None) -> dict[str, Any]:
    """A JSON object, asked for with the given token, or that of HEADWAY_API_TOKEN or HEADWAY_API_TOKEN_FILE, if any.

    Raises:
        Unavailable: Nothing answers there, or not with JSON, or the token is not the right one.
    """
    token = token or secret(None, VARIABLE)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limit = aiohttp.ClientTimeout(CALL_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=limit, headers=headers) as http, http.get(url) as reply:
            if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise Unavailable(f"{url} asks for a token: set HEADWAY_API_TOKEN to the one of the controller")
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
