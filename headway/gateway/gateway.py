"""The gateway of a process: its sessions, and the address at which agents reach them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headway.errors import Unavailable
from headway.gateway.policy import Limits, Policy
from headway.gateway.session import Session
from headway.gateway.sessions import Sessions

DEFAULT_TIMEOUT_S = 3600.0
OUTSIDE = Limits(max_turns=256, max_tokens=262_144)


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent needs to reach its session."""

    url: str
    """Without a path: `http://host:port`."""
    session_id: str
    api_key: str

    @property
    def openai_url(self) -> str:
        """`base_url` of the `openai` client."""
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """`base_url` of the `anthropic` client."""
        return f"{self.url}/sessions/{self.session_id}"

    @property
    def session_url(self) -> str:
        """Where rewards are given: `POST .../reward`, `.../end`."""
        return f"{self.url}/v1/sessions/{self.session_id}"


class Gateway:
    """Opens sessions for workflows at once, and for others within bounds.

    Args:
        outside: What answers sessions that no workflow opened; None while nothing can.
    """

    def __init__(self, outside: Callable[[], Policy | None] = lambda: None, max_outside: int = 1024) -> None:
        self.sessions = Sessions(max_outside)
        self._outside = outside
        self._url = ""
        self._is_served = asyncio.Event()
        self._closing: list[Callable[[], Awaitable[None]]] = []

    def serve_at(self, url: str) -> None:
        """Tell the address, once there is one."""
        self._url = url
        self._is_served.set()

    def when_closed(self, close: Callable[[], Awaitable[None]]) -> None:
        """Something of the agents that has to be closed, too."""
        self._closing.append(close)

    async def close(self) -> None:
        """End all sessions."""
        self.sessions.close()
        for close in self._closing:
            await close()

    async def url(self) -> str:
        """The address; waits until there is one."""
        await self._is_served.wait()
        return self._url

    async def open(self, policy: Policy, timeout_s: float, limits: Limits | None = None) -> tuple[Session, Access]:
        """Open a session for an episode; whoever opens it ends it."""
        url = await self.url()
        session = self.sessions.open(policy, timeout_s, limits)
        return session, Access(url, session.id, session.key)

    def open_outside(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Session:
        """Open a session that belongs to no task.

        Raises:
            Unavailable: No version is published yet.
            Overloaded: Too many are open.
        """
        if (policy := self._outside()) is None:
            raise Unavailable("no version of the policy is published yet")
        return self.sessions.open_bounded(policy, timeout_s, OUTSIDE)
