"""The wire side: requests in, replies out. What names, versions and leadership mean is decided in the modules it calls.

Streams end when the caller ends them, or with UNAVAILABLE when this replica closes, so that callers go to another one.
A Campaign stream that ends, for whatever reason, gives its lease back at once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import grpc

from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import version_from_wire, version_to_wire
from headway.v1 import name_resolve_pb2 as pb
from headway.v1 import name_resolve_pb2_grpc as pb_grpc
from services.name_resolve.elections import Elections, Standing
from services.name_resolve.feed import Feed
from services.name_resolve.keys import NAMES, VERSIONS, Record, name_of, published_of, record_of
from services.name_resolve.names import Names
from services.name_resolve.session import Calls, Handler
from services.name_resolve.store import Change, Changes, Item, Store, View
from services.name_resolve.versions import Versions

if TYPE_CHECKING:  # subscriptable in the type stubs only
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

MAX_WAIT_S = 3600.0
DEFAULT_CAMPAIGN_TTL_S = 10.0
CLOSING = "this replica of name-resolve is closing"


class NameResolveApi(pb_grpc.NameResolveServicer):
    """NameResolve over one store."""

    def __init__(self, store: Store, feed: Feed, supervisor: Supervisor, waits: Waits) -> None:
        self._names = Names(store, feed)
        self._versions = Versions(store, feed)
        self._elections = Elections(store, feed)
        self._supervisor = supervisor
        self._waits = waits
        self._open_campaigns: set[int] = set()
        self._closing = asyncio.Event()
        self._sessions: set[Calls] = set()
        self._handlers: dict[str, Handler] = {
            "register": self.Register,
            "deregister": self.Deregister,
            "resolve": self.Resolve,
            "publish_version": self.PublishVersion,
            "get_version": self.GetVersion,
            "list_versions": self.ListVersions,
        }

    @property
    def num_sessions(self) -> int:
        """Open sessions of clients."""
        return len(self._sessions)

    @property
    def num_campaigns(self) -> int:
        """Candidates that lead or stand by through this replica."""
        return len(self._open_campaigns)

    async def close(self) -> None:
        """End the streams that the feed does not end, and give the leases of open campaigns back."""
        self._closing.set()
        for calls in self._sessions:
            calls.close()
        await asyncio.gather(
            *(self._names.revoke(lease_id) for lease_id in self._open_campaigns), return_exceptions=True
        )

    async def Register(self, request: pb.RegisterRequest, context: "Context") -> pb.RegisterReply:
        record = Record(request.value, dict(request.metadata), request.owner, time.time())
        lease_id, revision = await self._names.register(
            request.name, record, ttl_s=request.ttl_s, lease_id=request.lease_id, replace=request.replace
        )
        return pb.RegisterReply(lease_id=lease_id, revision=revision)

    async def KeepAlive(
        self, requests: AsyncIterator[pb.KeepAliveRequest], context: "Context"
    ) -> AsyncIterator[pb.KeepAliveReply]:
        """Waits for: the caller's next request, or this replica to close."""
        closing = asyncio.ensure_future(self._closing.wait())
        following: asyncio.Task[pb.KeepAliveRequest | None] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait({following, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise Unavailable(CLOSING)
                request = following.result()
                if request is None:
                    return
                ttl_s = await self._names.keep_alive(request.lease_id)
                yield pb.KeepAliveReply(lease_id=request.lease_id, ttl_s=ttl_s)
        finally:
            closing.cancel()
            if following is not None:
                following.cancel()

    async def Deregister(self, request: pb.DeregisterRequest, context: "Context") -> pb.DeregisterReply:
        if request.lease_id:
            await self._names.revoke(request.lease_id)
            return pb.DeregisterReply()
        if request.name:
            return pb.DeregisterReply(num_removed=await self._names.deregister(request.name))
        if not request.prefix:
            raise InvalidInput("name what to remove: a name, a prefix (`/` for everything) or a lease")
        return pb.DeregisterReply(num_removed=await self._names.clear(request.prefix, request.with_versions))

    async def Resolve(self, request: pb.ResolveRequest, context: "Context") -> pb.ResolveReply:
        view = await self._resolve(request)
        return pb.ResolveReply(entries=_entries(view), revision=view.revision)

    async def _resolve(self, request: pb.ResolveRequest) -> View:
        prefix = request.name or request.prefix
        if not request.wait_s:
            return await (self._names.get(prefix) if request.name else self._names.below(prefix))
        min_entries = max(1, request.min_entries)
        with self._waits.waiting_for(f"{min_entries} names at {prefix or '/'}"):
            return await self._names.wait(prefix, min_entries, min(request.wait_s, MAX_WAIT_S))

    async def Watch(self, request: pb.WatchRequest, context: "Context") -> AsyncIterator[pb.WatchReply]:
        """Waits for: the next change."""
        async with aclosing(self._names.watch(request.prefix, request.from_revision)) as changes:
            async for news in changes:
                yield _news(news)

    async def PublishVersion(self, request: pb.PublishVersionRequest, context: "Context") -> pb.PublishVersionReply:
        version = version_from_wire(request.version)
        revision = await self._versions.publish(request.run, version, request.manifest_sha256, request.fencing_token)
        return pb.PublishVersionReply(revision=revision)

    async def GetVersion(self, request: pb.GetVersionRequest, context: "Context") -> pb.VersionRecord:
        return _version(await self._versions.get(request.run))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: "Context") -> pb.ListVersionsReply:
        view = await self._versions.below(request.prefix)
        return pb.ListVersionsReply(records=[_version(item) for item in view.items])

    async def WatchVersion(
        self, request: pb.WatchVersionRequest, context: "Context"
    ) -> AsyncIterator[pb.WatchVersionReply]:
        """Waits for: the next publication. What was skipped shows in the sequence numbers."""
        seen, last = request.after_sequence, None
        async with aclosing(self._versions.watch(request.run, request.from_revision)) as items:
            async for item in items:
                published = published_of(item)
                if (last is None or published.version > last) and published.sequence != seen:
                    has_gap = bool(seen) and published.sequence != seen + 1
                    yield _version_news(item, has_gap)
                    seen, last = published.sequence, published.version

    async def Campaign(self, request: pb.CampaignRequest, context: "Context") -> AsyncIterator[pb.CampaignReply]:
        """Waits for: the candidates before this one, then for the end of the stream."""
        if self._closing.is_set():
            raise Unavailable(CLOSING)
        lease_id = request.lease_id or await self._names.grant(request.ttl_s or DEFAULT_CAMPAIGN_TTL_S)
        self._open_campaigns.add(lease_id)
        try:
            if not request.lease_id:
                await self._elections.enter(request.name, request.candidate, lease_id)
            with self._waits.waiting_for(f"{request.candidate or 'a candidate'} stands for {request.name}"):
                async with aclosing(self._elections.stand(request.name, lease_id)) as standings:
                    async for standing in standings:
                        yield _standing(standing, lease_id)
        finally:
            self._open_campaigns.discard(lease_id)
            self._supervisor.start(f"give up {request.name}", self._give_up(request.name, lease_id))

    async def _give_up(self, office: str, lease_id: int) -> None:
        try:
            await self._names.revoke(lease_id)
        except HeadwayError as error:
            log.warning("a candidature for %s ends when its lease lapses: %s", office, error)

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: "Context"
    ) -> AsyncIterator[pb.SessionReply]:
        """Waits for: calls that are done, or this replica to close."""
        calls = Calls(self._handlers, context)
        self._sessions.add(calls)
        try:
            async with calls.taken_from(requests):
                while answers := await calls.next_answers():
                    yield pb.SessionReply(answers=answers)
                if self._closing.is_set():
                    raise Unavailable(CLOSING)
        finally:
            self._sessions.discard(calls)


def _entries(view: View) -> list[pb.Entry]:
    return [_entry(item) for item in sorted(view.items, key=lambda item: name_of(NAMES, item.key))]


def _entry(item: Item) -> pb.Entry:
    record = record_of(item)
    return pb.Entry(
        name=name_of(NAMES, item.key),
        value=record.value,
        revision=item.revision,
        create_revision=item.create_revision,
        metadata=record.metadata,
        registered_at=record.registered_at,
        lease_id=item.lease_id,
    )


def _news(news: View | Changes) -> pb.WatchReply:
    if isinstance(news, View):
        return pb.WatchReply(snapshot=pb.Snapshot(entries=_entries(news)), revision=news.revision)
    return pb.WatchReply(changes=[_change(change) for change in news.changes], revision=news.revision)


def _change(change: Change) -> pb.Change:
    if change.item is None:
        return pb.Change(removed=name_of(NAMES, change.key))
    return pb.Change(put=_entry(change.item))


@lru_cache(maxsize=256)
def _version_news(item: Item, has_gap: bool) -> pb.WatchVersionReply:
    """Made once for all who watch."""
    return pb.WatchVersionReply(record=_version(item), has_gap=has_gap, revision=item.revision)


def _version(item: Item) -> pb.VersionRecord:
    published = published_of(item)
    return pb.VersionRecord(
        version=version_to_wire(published.version),
        manifest_sha256=published.manifest_sha256,
        fencing_token=published.fencing_token,
        published_at=published.published_at,
        sequence=published.sequence,
        run=name_of(VERSIONS, item.key),
    )


def _standing(standing: Standing, lease_id: int) -> pb.CampaignReply:
    reply = pb.CampaignReply(leader=standing.leader, lease_id=lease_id)
    if standing.leadership is not None:
        reply.is_leader = True
        reply.fencing_token = standing.leadership.fencing_token
        reply.term = standing.leadership.term
    return reply
