"""An engine that runs as a child process: its own process group, its log in a file, killed with us.

Guarantee: when the block of `child_process` is left, no process of the group is left. If this process is killed, the
kernel kills the child.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from headway.errors import HeadwayError, InvalidInput, TimedOut, Unavailable
from headway.runtime.spawn import Spawned, spawn

GRACE_S = 5.0
"""After SIGTERM, before SIGKILL."""
POLL_S = 0.2
LAST_LINES = 15


class Child:
    """A running child process."""

    def __init__(self, name: str, process: Spawned, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log

    async def wait(self) -> None:
        """Wait until it ends.

        Raises:
            Unavailable: Always, when it has ended; with the last lines of its log.
        """
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise Unavailable(f"{self.name} {how}; the last lines of {self._log}:\n{self.last_lines()}")

    def last_lines(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])

    async def ready(self, is_ready: Callable[[], Any], timeout_s: float) -> None:
        """Ask `is_ready` until it says yes.

        Raises:
            Unavailable: The process ended instead.
            TimedOut: It did not become ready in time.
        """
        ended = asyncio.ensure_future(self.wait())
        polling = asyncio.ensure_future(_poll(is_ready))
        try:
            done, _ = await asyncio.wait({ended, polling}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                ended.result()
            if polling not in done:
                raise TimedOut(
                    f"{self.name} did not answer within {timeout_s:g} s (inference.start_timeout_s); "
                    f"the last lines of {self._log}:\n{self.last_lines()}"
                )
            polling.result()
        finally:
            ended.cancel()
            polling.cancel()

    async def stop(self) -> None:
        """SIGTERM to the whole group, then SIGKILL."""
        self._process.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._process.wait()
        self._process.signal(signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def child_process(
    name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
) -> AsyncIterator[Child]:
    """Run a command for as long as the block runs.

    Raises:
        InvalidInput: There is no such program.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = spawn(command, environment, output.fileno())
        except OSError as error:
            raise InvalidInput(
                f"cannot start {name} with {command[0]}: {error.strerror} (inference.command)"
            ) from error
    child = Child(name, process, log)
    try:
        yield child
    finally:
        await child.stop()


def free_port(host: str) -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


async def ask(method: str, url: str, body: Any = None, timeout_s: float = 600.0, key: str = "") -> Any:
    """One HTTP call to an engine that asks for this key, or for none; the decoded JSON of its answer.

    Raises:
        Unavailable: It does not answer, or answers with an error; with its words.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(method, url, json=body, headers=_authorization(key)) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise Unavailable(f"{method} {url}: {response.status} {text[:500]}")
            return await response.json(content_type=None) if text else None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"{method} {url}: {type(error).__name__} {error}") from error


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _poll(is_ready: Callable[[], Any]) -> None:
    while True:
        with suppress(HeadwayError):
            if await is_ready():
                return
        await asyncio.sleep(POLL_S)
