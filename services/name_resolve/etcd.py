"""The store in etcd 3: linearizable reads, one transaction a write, leases, and a watch that resumes at the last event.

    call -> a member that is connected -> etcd3aio (KV, lease, auth) -> grpc.aio
                 ^ the next one when it fails

- Reads are tried again, on another member, until the deadline. A write is sent once: after a broken connection nobody
  knows whether it took effect, and `Unavailable` says so.
- Reads that come together travel together, as one transaction, so that many clients cost few round trips; but not to
  an etcd before 3.5.7, which a cancelled read-only transaction ends (etcd issues 14110 and 14891).
- The channels are ours, because etcd3aio's own take IP addresses only; `dns:///` lets gRPC resolve names, and again.
- The watch is ours, on etcd3aio's stub: its own resumes after the revision in the response's header, which is ahead of
  the events while a watch catches up, and so loses events when a connection breaks just then.
"""

import asyncio
import ipaddress
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from etcd3aio import (
    EtcdError,
    EtcdPermissionDeniedError,
    EtcdTransientError,
    EtcdUnauthenticatedError,
)
from etcd3aio._protobuf import (
    Compare,
    RequestOp,
    TxnResponse,
    WatchCreateRequest,
    WatchRequest,
    WatchResponse,
    WatchStub,
)
from etcd3aio.auth import AuthService
from etcd3aio.kv import KVService, SortOrder, prefix_range_end
from etcd3aio.lease import LeaseService
from etcd3aio.maintenance import MaintenanceService

from headway.errors import HeadwayError, InvalidInput, Overloaded, Refused, Unavailable
from services.name_resolve.keys import ROOT
from services.name_resolve.store import (
    Change,
    Changes,
    Delete,
    Guard,
    Item,
    LeaseLapsed,
    News,
    Outcome,
    Put,
    Store,
    Unchanged,
    View,
    Write,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0
ATTEMPT_S = 2.0
WRITE_S = 3.0
"""A write that a lost leader had taken is never answered; the caller knows sooner."""
BACKOFF_S = (0.05, 1.0)
MAX_KEYS_TOGETHER = 120
"""etcd refuses more than 128 operations in a transaction."""
READS_TOGETHER_SINCE = (3, 5, 7)
PUT = 0
CHANNEL_OPTIONS = [
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
MEANINGS: dict[grpc.StatusCode, type[HeadwayError]] = {
    grpc.StatusCode.NOT_FOUND: LeaseLapsed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.PERMISSION_DENIED: Refused,
    grpc.StatusCode.UNAUTHENTICATED: Refused,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
}
"""Of the statuses that etcd answers with; any other: `Unavailable`."""
STALE_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")
"""What etcd says to a token that a restart or a change of users has made worthless."""


@dataclass(frozen=True)
class Login:
    """Who we are to etcd; empty: nobody in particular."""

    user: str = ""
    password: str = ""
    ca: bytes | None = None
    """PEM of the authority that signed etcd's certificate; None: no TLS."""
    certificate: bytes | None = None
    key: bytes | None = None


class Member:
    """One endpoint: its channel, and etcd3aio's services on it."""

    def __init__(self, endpoint: str, login: Login) -> None:
        self.endpoint = endpoint
        self.channel = _channel_to(endpoint, login)
        self.kv = KVService(self.channel, max_attempts=1)
        self.lease = LeaseService(self.channel, max_attempts=1)
        self.auth = AuthService(self.channel, max_attempts=1)
        self.maintenance = MaintenanceService(self.channel, max_attempts=1)
        self.watch = WatchStub(self.channel)
        self.token: str | None = None
        self.version: tuple[int, ...] = ()
        """Of etcd; empty until `greet`."""

    @property
    def is_connected(self) -> bool:
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    @property
    def watch_metadata(self) -> tuple[tuple[str, str], ...]:
        """Ends the stream when this member loses the leader, instead of leaving it silent."""
        token = (("token", self.token),) if self.token else ()
        return (*token, ("hasleader", "true"))

    @property
    def may_read_together(self) -> bool:
        return self.version >= READS_TOGETHER_SINCE

    async def greet(self) -> None:
        """Ask for the version."""
        reply = await self.maintenance.status(timeout=ATTEMPT_S)
        self.version = tuple(int(number) for number in re.findall(r"\d+", reply.version)[:3])

    async def log_in(self, login: Login) -> None:
        reply = await self.auth.authenticate(login.user, login.password, timeout=ATTEMPT_S)
        self.token = reply.token
        self.kv.set_token(reply.token)
        self.lease.set_token(reply.token)
        self.maintenance.set_token(reply.token)


class Reads:
    """Keys that several callers want, and the answer for all of them."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.answer: asyncio.Task[View]


class EtcdStore:
    """A cluster of one or more endpoints."""

    def __init__(
        self,
        endpoints: Sequence[str],
        login: Login | None = None,
        timeout_s: float = TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """
        Args:
            endpoints: "host:port" each; a host may be a DNS name with several addresses.
            login: User and TLS.
            timeout_s: Longest that any call takes, seconds.
            start_timeout_s: Longest that `open` waits for etcd, which may be starting too, seconds.
        """
        self._endpoints = endpoints
        self._start_timeout_s = start_timeout_s
        self._login = login or Login()
        self._timeout_s = timeout_s
        self._members: list[Member] = []
        self._current = 0
        self._is_reading = False
        self._next_reads: Reads | None = None
        self._one_batch = asyncio.Lock()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with AsyncExitStack() as stack:
            for endpoint in self._endpoints:
                member = Member(endpoint, self._login)
                stack.push_async_callback(member.channel.close)
                self._members.append(member)
            await self._connected(asyncio.get_running_loop().time() + self._start_timeout_s)
            await self._read("connect", lambda member: member.kv.get(ROOT, count_only=True, timeout=ATTEMPT_S))
            yield self
            self._members.clear()

    async def get(self, *keys: str) -> View:
        """See `Store.get`; what comes while a request is under way goes together with the next one."""
        if self._is_reading and self._members[self._current].may_read_together:
            return await self._get_with_others(keys)
        self._is_reading = True
        try:
            return await self._get_keys(keys)
        finally:
            self._is_reading = False

    async def below(self, prefix: str) -> View:
        end = prefix_range_end(prefix)
        reply = await self._read(
            f"read {prefix}", lambda member: member.kv.get(prefix, end, sort_order=SortOrder.ASCEND, timeout=ATTEMPT_S)
        )
        return View(tuple(_item(kv) for kv in reply.kvs), reply.header.revision)

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        if not guards and len(writes) == 1 and isinstance(writes[0], Delete):
            return await self._delete(writes[0])
        if not guards and len(writes) == 1 and isinstance(writes[0], Put):
            return await self._put(writes[0])
        compare = [_compare(guard) for guard in guards]
        success = [_operation(write) for write in writes]
        failure = [KVService.txn_op_get(guard.key) for guard in guards]
        reply: TxnResponse = await self._write(
            "write", lambda member, timeout_s: member.kv.txn(compare, success, failure, timeout=timeout_s)
        )
        if reply.succeeded:
            num_deleted = sum(response.response_delete_range.deleted for response in reply.responses)
            return Outcome(True, reply.header.revision, num_deleted)
        found = tuple(_item(kv) for response in reply.responses for kv in response.response_range.kvs)
        return Outcome(False, reply.header.revision, found=found)

    async def _delete(self, delete: Delete) -> Outcome:
        """Not as a transaction: a full etcd refuses those, and must be able to become less full."""
        end = prefix_range_end(delete.key) if delete.below else None
        reply = await self._write(
            f"delete {delete.key}", lambda member, timeout_s: member.kv.delete(delete.key, end, timeout=timeout_s)
        )
        return Outcome(True, reply.header.revision, reply.deleted)

    async def _put(self, put: Put) -> Outcome:
        """What needs no transaction is quicker without."""
        reply = await self._write(
            f"put {put.key}",
            lambda member, timeout_s: member.kv.put(put.key, put.value, put.lease_id, timeout=timeout_s),
        )
        return Outcome(True, reply.header.revision)

    async def grant(self, ttl_s: float) -> int:
        seconds = max(1, math.ceil(ttl_s))
        reply = await self._write(
            "grant a lease", lambda member, timeout_s: member.lease.grant(seconds, timeout=timeout_s)
        )
        return int(reply.ID)

    async def keep_alive(self, lease_id: int) -> float:
        ttl_s: int = await self._read(f"keep lease {lease_id:x}", lambda member: _keep_once(member, lease_id))
        if ttl_s <= 0:
            raise LeaseLapsed(f"lease {lease_id:x} has lapsed")
        return float(ttl_s)

    async def revoke(self, lease_id: int) -> None:
        try:
            await self._write(
                f"revoke lease {lease_id:x}", lambda member, timeout_s: member.lease.revoke(lease_id, timeout=timeout_s)
            )
        except LeaseLapsed:
            return

    async def watch(self, prefix: str, after: int) -> News:
        """See `Store.watch`. Waits for: etcd's next event; a broken stream is opened again after the last one seen."""
        revision, backoff_s = after, BACKOFF_S[0]
        while True:
            try:
                async with aclosing(self._watch_once(prefix, revision)) as stream:
                    async for news in stream:
                        revision, backoff_s = news.revision, BACKOFF_S[0]
                        yield news
            except HeadwayError as error:
                log.warning("watch of %s after revision %d: %s; again in %.2f s", prefix, revision, error, backoff_s)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, BACKOFF_S[1])

    async def _watch_once(self, prefix: str, after: int) -> News:
        """One stream, until it breaks; ends by itself where the changes are compacted, after a view."""
        member = await self._connected(self._deadline())
        create = WatchCreateRequest(key=prefix.encode(), range_end=prefix_range_end(prefix), start_revision=after + 1)
        stream = member.watch.Watch(metadata=member.watch_metadata)
        try:
            await stream.write(WatchRequest(create_request=create))
            async for response in stream:
                if response.compact_revision or (response.created and response.header.revision < after):
                    yield await self.below(prefix)
                    return
                if response.canceled:  # etcd leaves the stream open; the reason may be a token that a restart forgot
                    member.token = None
                    raise Refused(f"{member.endpoint} cancelled the watch: {response.cancel_reason}")
                if response.events:
                    yield _changes(response)
        except grpc.aio.AioRpcError as error:
            await self._on_error(f"watch {prefix}", member, error)
        finally:
            stream.cancel()
        raise Unavailable(f"{member.endpoint} closed the watch")

    async def _get_with_others(self, keys: Sequence[str]) -> View:
        """Read together with all who come before the request is made, so after each of them has come."""
        reads = self._next_reads
        if reads is None or len(reads.keys) + len(keys) > MAX_KEYS_TOGETHER:
            reads = self._next_reads = Reads()
            reads.answer = asyncio.create_task(self._answer(reads), name="etcd reads")
            reads.answer.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have given up
        reads.keys.update(keys)
        view = await asyncio.shield(reads.answer)
        return View(tuple(item for item in view.items if item.key in keys), view.revision)

    async def _answer(self, reads: Reads) -> View:
        async with self._one_batch:
            if self._next_reads is reads:
                self._next_reads = None
            return await self._get_keys(list(reads.keys))

    async def _get_keys(self, keys: Sequence[str]) -> View:
        if len(keys) == 1:
            return await self._get_one(keys[0])
        is_safe = self._members[self._current].may_read_together
        return await (self._get_many(keys) if is_safe else self._get_apart(keys))

    async def _get_one(self, key: str, revision: int = 0) -> View:
        reply = await self._read(f"read {key}", lambda member: member.kv.get(key, revision=revision, timeout=ATTEMPT_S))
        return View(tuple(_item(kv) for kv in reply.kvs), reply.header.revision)

    async def _get_many(self, keys: Sequence[str]) -> View:
        """All keys at one revision; when etcd is full, which makes it refuse every transaction, at one revision too."""
        gets = [KVService.txn_op_get(key) for key in keys]
        try:
            reply = await self._read("read", lambda member: member.kv.txn([], gets, timeout=ATTEMPT_S))
        except Overloaded:
            return await self._get_apart(keys)
        items = [_item(kv) for response in reply.responses for kv in response.response_range.kvs]
        return View(tuple(items), reply.header.revision)

    async def _get_apart(self, keys: Sequence[str]) -> View:
        """All keys at one revision, each with a request of its own."""
        revision = (await self._get_one(keys[0])).revision
        views = [await self._get_one(key, revision) for key in keys]
        return View(tuple(item for view in views for item in view.items), revision)

    async def _read(self, what: str, call: Callable[[Member], Awaitable[T]]) -> T:
        """Make a call that may be made again, until it succeeds or the deadline has passed."""
        deadline, backoff_s = self._deadline(), BACKOFF_S[0]
        while True:
            member = await self._connected(deadline)
            try:
                return await call(member)
            except (EtcdError, grpc.aio.AioRpcError, TimeoutError) as error:
                try:
                    await self._on_error(what, member, error)
                except Unavailable:
                    if asyncio.get_running_loop().time() + backoff_s > deadline:
                        raise
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, BACKOFF_S[1])

    async def _write(self, what: str, call: Callable[[Member, float], Awaitable[T]]) -> T:
        """Make a call once; again only where etcd refused it for its token, and so did nothing."""
        deadline = self._deadline()
        while True:
            member = await self._connected(deadline)
            try:
                return await call(member, min(WRITE_S, max(0.1, deadline - asyncio.get_running_loop().time())))
            except (EtcdError, grpc.aio.AioRpcError, TimeoutError) as error:
                await self._on_error(what, member, error)

    async def _connected(self, deadline: float) -> Member:
        """The current member, or the next one that is connected; logged in.

        Raises:
            Unavailable: None is, by the deadline.
        """
        order = [*self._members[self._current :], *self._members[: self._current]]
        member = next((member for member in order if member.is_connected), None)
        if member is None:
            member = await self._first_to_connect(order, deadline)
        self._current = self._members.index(member)
        if self._login.user and member.token is None:
            await self._log_in(member)
        if not member.version:
            await self._greet(member)
        return member

    async def _greet(self, member: Member) -> None:
        try:
            await member.greet()
        except (EtcdError, grpc.aio.AioRpcError, TimeoutError) as error:
            await self._on_error("ask for the version", member, error)

    async def _first_to_connect(self, members: Sequence[Member], deadline: float) -> Member:
        waiting = {asyncio.ensure_future(member.channel.channel_ready()): member for member in members}
        timeout_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        if not done:
            raise Unavailable(f"no etcd at {', '.join(self._endpoints)} answers")
        return waiting[done.pop()]

    async def _log_in(self, member: Member) -> None:
        try:
            await member.log_in(self._login)
        except EtcdUnauthenticatedError as error:
            raise Refused(f"etcd at {member.endpoint} refuses user {self._login.user!r}: {error}") from error
        except (EtcdError, TimeoutError) as error:
            raise Unavailable(f"log in to etcd at {member.endpoint}: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise Refused(f"etcd at {member.endpoint} refuses user {self._login.user!r}: {error.details()}") from error

    async def _on_error(self, what: str, member: Member, error: Exception) -> None:
        """Return when the call may be made again as it was; raise what it means otherwise."""
        text = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
        if any(reason in text for reason in STALE_TOKEN):
            if not self._login.user or member.token is None:
                raise Refused(f"{what}: etcd at {member.endpoint} wants a user: {text}") from error
            member.token = None
            return
        meaning = _meaning(error)(f"{what}: etcd at {member.endpoint}: {text or 'no answer in time'}")
        if isinstance(meaning, Unavailable):
            self._current = (self._members.index(member) + 1) % len(self._members)
        raise meaning from error

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s


def _meaning(error: Exception) -> type[HeadwayError]:
    """What a failed call means to our callers."""
    if isinstance(error, EtcdPermissionDeniedError | EtcdUnauthenticatedError):
        return Refused
    if isinstance(error, grpc.aio.AioRpcError):
        return MEANINGS.get(error.code(), Unavailable)
    return Unavailable


def _channel_to(endpoint: str, login: Login) -> grpc.aio.Channel:
    """A channel to "host:port"; a name with several addresses spreads the calls over all of them."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        target = f"ipv{ipaddress.ip_address(host).version}:{endpoint}"
    except ValueError:
        target = f"dns:///{endpoint}"
    if login.ca is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(login.ca, login.key, login.certificate)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


async def _keep_once(member: Member, lease_id: int) -> int:
    """Seconds that the lease has from now; 0: it is gone."""
    stream = member.lease.keep_alive(lease_id)
    try:
        async with asyncio.timeout(ATTEMPT_S):
            async for response in stream:
                return int(response.TTL)
    finally:
        stream.cancel()
    raise EtcdTransientError("the stream ended without a reply")


def _item(kv: Any) -> Item:
    return Item(kv.key.decode(), kv.value, kv.mod_revision, kv.create_revision, kv.lease)


def _changes(response: WatchResponse) -> Changes:
    changes = [
        Change(event.kv.key.decode(), _item(event.kv) if event.type == PUT else None, event.kv.mod_revision)
        for event in response.events
    ]
    return Changes(tuple(changes), changes[-1].revision)


def _compare(guard: Guard) -> Compare:
    key = guard.key.encode()
    if isinstance(guard, Unchanged):
        return Compare(result=Compare.EQUAL, target=Compare.MOD, key=key, mod_revision=guard.revision)
    return Compare(result=Compare.EQUAL, target=Compare.CREATE, key=key, create_revision=guard.revision)


def _operation(write: Write) -> RequestOp:
    if isinstance(write, Put):
        return KVService.txn_op_put(write.key, write.value, lease=write.lease_id)
    return KVService.txn_op_delete(write.key, range_end=prefix_range_end(write.key) if write.below else None)
