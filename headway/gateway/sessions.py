"""Which sessions there are, and whose key is whose.

    open --> [calls, rewards] --> end: by the agent, by who opened it, or by its time limit --> remembered for a while

Those that are opened from outside are bounded in number and in time. A call that comes with the key of a session that
has ended is told why it ended.
"""

import asyncio
import secrets
from collections import OrderedDict

from headway.errors import NotFound, Overloaded, Unauthenticated
from headway.gateway.errors import SessionEnded
from headway.gateway.policy import Limits, Policy
from headway.gateway.session import Session

MAX_REMEMBERED = 1024


class Sessions:
    """The open sessions of a process, by id and by key.

    Args:
        max_open: How many `open_bounded` may keep open.
    """

    def __init__(self, max_open: int = 1024) -> None:
        self._max_open = max_open
        self._by_name: dict[str, Session] = {}
        """By id and by key."""
        self._timers: dict[Session, asyncio.TimerHandle] = {}
        self._bounded: set[Session] = set()
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Why those that are gone have ended, by id and by key."""

    @property
    def num_open(self) -> int:
        return len(self._timers)

    def open(self, policy: Policy, timeout_s: float, limits: Limits | None = None) -> Session:
        """Open a session; after `timeout_s` seconds it ends by itself."""
        session = Session(policy, limits)
        self._by_name[session.id] = self._by_name[session.key] = session
        reason = f"it was left open for {timeout_s:g} s, its time limit"
        self._timers[session] = asyncio.get_running_loop().call_later(timeout_s, self.end, session, reason)
        return session

    def open_bounded(self, policy: Policy, timeout_s: float, limits: Limits | None = None) -> Session:
        """Open one of a bounded number of sessions.

        Raises:
            Overloaded: So many are open.
        """
        if len(self._bounded) >= self._max_open:
            raise Overloaded(f"{self._max_open} sessions are open: end some, or wait until they end")
        session = self.open(policy, timeout_s, limits)
        self._bounded.add(session)
        return session

    def find(self, key: str, name: str | None = None) -> Session:
        """The open session of a call.

        Args:
            key: What the call is authenticated by; may be empty where `name` is a session's key.
            name: A session's id or key, from the URL; None: the session that the key belongs to.

        Raises:
            Unauthenticated: The key is no session's, or not this one's.
            SessionEnded: The session has ended.
        """
        session = self._by_name.get(key if name is None else name)
        given = name if name is not None and name.startswith("sk-") else key
        if session is not None and secrets.compare_digest(session.key.encode(), given.encode()):
            return session
        if given.startswith("sk-") and (reason := self._ended.get(given)) is not None:
            raise SessionEnded(f"the session has ended: {reason}")
        raise Unauthenticated("no open session has this key; the key of a session goes with each of its calls")

    def get(self, id: str) -> Session:
        """A session by its id, for who opened it.

        Raises:
            NotFound: There is none.
        """
        if (session := self._by_name.get(id)) is None:
            raise NotFound(f"there is no open session {id!r}{self._why(id)}")
        return session

    def end(self, session: Session, reason: str) -> None:
        """End a session and forget it; ending it twice is harmless."""
        session.end(reason)
        if (timer := self._timers.pop(session, None)) is None:
            return
        timer.cancel()
        self._bounded.discard(session)
        for name in (session.id, session.key):
            del self._by_name[name]
            self._ended[name] = session.end_reason
        while len(self._ended) > 2 * MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def close(self) -> None:
        """End all of them."""
        for session in list(self._timers):
            self.end(session, "the rollout controller is shutting down")

    def _why(self, id: str) -> str:
        reason = self._ended.get(id)
        return f": it has ended: {reason}" if reason is not None else ""
