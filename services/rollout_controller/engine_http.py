"""HTTP to one engine server: every call has a deadline, every failure is one of three kinds."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import orjson

from headway.runtime.tracing import trace_headers
from services.rollout_controller.engine_api import RequestRefused, ServerBusy, ServerFailed, ServerGone, ServerSilent

CONNECT_S = 5.0
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: none is reused while it is being closed."""
JSON = {"Content-Type": "application/json"}
LONGEST_MESSAGE = 500


def open_session() -> aiohttp.ClientSession:
    """One session for all servers. No limit on connections: a waiting request would look like a slow server."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20)


class EngineHttp:
    """Calls to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str = "", admin_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {**JSON, **_bearer(api_key)}
        self._admin_headers = {**JSON, **_bearer(admin_key or api_key)}

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = CONNECT_S, is_admin: bool = False
    ) -> tuple[int, Any]:
        """Status and JSON (or text) of the reply, whatever the status.

        Raises:
            ServerSilent, ServerGone: No reply in time; no connection.
        """
        headers = self._admin_headers if is_admin else self._headers
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                return reply.status, _decoded(await reply.read())
        except TimeoutError as error:
            raise ServerSilent(f"{method} {self.url}{path}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The payloads of a stream of server-sent events, without `[DONE]`.

        Raises:
            RequestRefused, ServerBusy, ServerFailed: By status.
            ServerGone: The connection was refused, or broke.
        """
        try:
            headers = {**self._headers, **trace_headers()}
            async with self._session.post(self.url + path, data=orjson.dumps(body), headers=headers) as reply:
                if reply.status != 200:
                    raise failure(reply.status, f"{self.url}{path}: {message_of(_decoded(await reply.read()))}")
                async for payload in _events(reply.content):
                    yield payload
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__}: {error}") from error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in content.iter_any():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                yield payload


def failure(status: int, message: str) -> RequestRefused | ServerBusy | ServerFailed:
    """The error that a status stands for: 4xx is the caller's mistake and is not tried again."""
    if status in (429, 503):
        return ServerBusy(f"{status}: {message}")
    if 400 <= status < 500 and status != 408:
        return RequestRefused(f"{status}: {message}")
    return ServerFailed(f"{status}: {message}")


def message_of(body: Any) -> str:
    """The message in any of the forms in which engines send one, cut to a line's length."""
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or body.get("detail") or str(body)
    return str(body)[:LONGEST_MESSAGE]


def _decoded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
