"""The store in a named, detached actor of a Ray cluster: what it holds outlives every client, and dies with its node.

    RayStore, one in each name-resolve process  ->  one actor, a MemoryStore  ->  long polls for watches

Ray's own key-value store has neither leases nor watches, so the actor brings them along. Where the actor was lost Ray
starts it again, empty: leases have lapsed, so that clients register again, and watches begin with a view; published
versions are gone. Use etcd where that matters.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import ray

from headway.errors import Unavailable
from services.name_resolve.memory import MemoryStore
from services.name_resolve.store import Changes, Guard, News, Outcome, Store, View, Write

log = logging.getLogger(__name__)

T = TypeVar("T")
NAMESPACE = "headway"
TIMEOUT_S = 10.0
POLL_S = 20.0
"""Longest that a watch's call waits inside the actor."""
RETRY_S = 0.5


class NamesActor:
    """A MemoryStore behind Ray's remote calls."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    async def get(self, *keys: str) -> View:
        return await self._store.get(*keys)

    async def below(self, prefix: str) -> View:
        return await self._store.below(prefix)

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        return await self._store.transact(guards, writes)

    async def grant(self, ttl_s: float) -> int:
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease_id: int) -> float:
        return await self._store.keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        await self._store.revoke(lease_id)

    async def news(self, prefix: str, after: int, wait_s: float) -> View | Changes | None:
        """The next thing that a watch would see; None: nothing happened for `wait_s` seconds."""
        async with aclosing(self._store.watch(prefix, after)) as watch:
            try:
                async with asyncio.timeout(wait_s):
                    return await anext(watch)
            except TimeoutError:
                return None


class RayStore:
    """The actor of one name in the Ray cluster of RAY_ADDRESS, or of this machine."""

    def __init__(self, actor_name: str, timeout_s: float = TIMEOUT_S) -> None:
        self._actor_name = actor_name
        self._timeout_s = timeout_s
        self._actor: Any = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        try:
            self._actor = await asyncio.to_thread(self._find)
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            raise Unavailable(f"no Ray cluster for cluster.name_resolve.type=ray: {error}") from error
        yield self

    def _find(self) -> Any:
        if not ray.is_initialized():
            ray.init(namespace=NAMESPACE, log_to_driver=False, ignore_reinit_error=True)
        actor = ray.remote(NamesActor).options(
            name=self._actor_name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=1000,
            num_cpus=0,
        )
        return actor.remote()

    async def get(self, *keys: str) -> View:
        return await self._answer(self._actor.get.remote(*keys))

    async def below(self, prefix: str) -> View:
        return await self._answer(self._actor.below.remote(prefix))

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        return await self._answer(self._actor.transact.remote(list(guards), list(writes)))

    async def grant(self, ttl_s: float) -> int:
        return await self._answer(self._actor.grant.remote(ttl_s))

    async def keep_alive(self, lease_id: int) -> float:
        return await self._answer(self._actor.keep_alive.remote(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._answer(self._actor.revoke.remote(lease_id))

    async def watch(self, prefix: str, after: int) -> News:
        """See `Store.watch`. Waits for: the actor's next change, in calls of at most POLL_S."""
        revision = after
        while True:
            try:
                news: View | Changes | None = await self._answer(
                    self._actor.news.remote(prefix, revision, POLL_S), POLL_S
                )
            except Unavailable as error:
                log.warning("watch of %s: %s; trying again", prefix, error)
                await asyncio.sleep(RETRY_S)
                continue
            if news is not None:
                revision = news.revision
                yield news

    async def _answer(self, reference: Awaitable[T], wait_s: float = 0.0) -> T:
        """What the actor says.

        Raises:
            Unavailable: It is gone, or does not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                return await reference
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise Unavailable(f"the Ray actor {self._actor_name}: {error or 'no answer in time'}") from error
