"""The client of name-resolve: register, find, watch, publish, lead.

    async with NameClient("127.0.0.1:7000", "gsm8k/trial0") as names:
        await names.register("services/reward/0", "10.0.0.7:4711")
        await names.wait("services/inference", min_entries=2, timeout_s=600)

Guarantee: it goes to another replica when one fails; a registration is made again when its lease was lost, until it is
closed; a watch goes on where it was, without a change lost or doubled, or says so with a snapshot. Nothing blocks the
loop, and every wait has an end or is a watch.
"""

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from types import TracebackType
from typing import Any, Self

from headway.core.version import PolicyVersion
from headway.errors import NotFound, TimedOut, Unavailable
from headway.runtime.names_campaign import Candidature, Leadership
from headway.runtime.names_keeper import Keeper
from headway.runtime.names_link import ATTEMPT_S, Link
from headway.runtime.names_records import (
    Entry,
    NameEvent,
    Put,
    Removed,
    Snapshot,
    VersionRecord,
    entry_from_wire,
    events_from_wire,
    version_record_from_wire,
)
from headway.runtime.names_registration import Registration
from headway.runtime.wire import version_to_wire
from headway.v1 import name_resolve_pb2 as pb

__all__ = [
    "Entry",
    "Leadership",
    "NameClient",
    "NameEvent",
    "Put",
    "Registration",
    "Removed",
    "Snapshot",
    "VersionRecord",
]

TIMEOUT_S = 20.0
WAIT_S = 30.0
"""Longest wait that one call asks for."""
Entries = list[Entry]


class NameClient:
    """What a process does with name-resolve. Used with `async with`, from one event loop."""

    def __init__(self, addresses: str, run: str = "") -> None:
        """
        Args:
            addresses: "host:port" of name-resolve; several, separated by commas, are replicas.
            run: "experiment/trial"; names are below it. Empty: names are absolute.

        Raises:
            InvalidInput: There is no address.
        """
        self.run = run.strip("/")
        self._link = Link(addresses)
        self._keeper = Keeper(self._link)
        self._keeping: asyncio.Task[None] | None = None
        self._registrations: weakref.WeakSet[Registration] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        await self._link.open()
        self._keeping = asyncio.create_task(self._keeper.run(), name="keep leases")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take back what is registered, and hang up."""
        await asyncio.gather(*(registration.close() for registration in list(self._registrations)))
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self._link.close()

    async def register(
        self,
        name: str,
        value: str,
        *,
        ttl_s: float = 10.0,
        replace: bool = True,
        metadata: Mapping[str, str] | None = None,
    ) -> Registration:
        """Register a name, and keep it until the registration or the client is closed.

        Args:
            name: Below the run, "services/reward/0".
            value: For a service, its address.
            ttl_s: The name lapses when this process was silent for so long, seconds; 0: it stays until deleted.
            replace: Take the name over from whoever has it.
            metadata: Anything else about the owner.

        Raises:
            AlreadyExists: Somebody has it, and `replace` is false.
            Unavailable: Name-resolve does not answer.
        """
        request = pb.RegisterRequest(
            name=self._absolute(name),
            value=value,
            ttl_s=ttl_s,
            replace=replace,
            metadata=metadata,
            owner=uuid.uuid4().hex,
        )
        registration = Registration(self._link, self._keeper, request)
        await registration.open()
        self._registrations.add(registration)
        return registration

    async def deregister(self, name: str) -> None:
        """Delete a name, whoever owns it.

        Raises:
            NotFound: It is not there.
        """
        await self._remove(pb.DeregisterRequest(name=self._absolute(name)))

    async def clear(self, prefix: str, *, with_versions: bool = False) -> int:
        """Delete a prefix and everything below it, whoever owns it; how many names and versions."""
        request = pb.DeregisterRequest(prefix=self._absolute(prefix) or "/", with_versions=with_versions)
        return await self._remove(request)

    async def _remove(self, request: pb.DeregisterRequest) -> int:
        what = f"delete {request.name or request.prefix}"
        reply: pb.DeregisterReply = await self._link.call(
            what, lambda stub, timeout_s: stub.Deregister(request, timeout=timeout_s), TIMEOUT_S
        )
        return reply.num_removed

    async def get(self, name: str) -> Entry:
        """One name.

        Raises:
            NotFound: It is not there.
        """
        return (await self._resolve(pb.ResolveRequest(name=self._absolute(name)), TIMEOUT_S))[0]

    async def list(self, prefix: str = "") -> Entries:
        """Everything at and below a prefix, in the order of the names."""
        return await self._resolve(pb.ResolveRequest(prefix=self._absolute(prefix)), TIMEOUT_S)

    async def wait(self, prefix: str, min_entries: int = 1, timeout_s: float = TIMEOUT_S) -> Entries:
        """Wait until there are at least so many names at or below a prefix; all of them.

        Raises:
            TimedOut: There are not; the message says how many there are.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            wait_s = max(0.01, min(WAIT_S, deadline - loop.time()))
            request = pb.ResolveRequest(prefix=self._absolute(prefix), min_entries=min_entries, wait_s=wait_s)
            try:
                return await self._resolve(request, wait_s)
            except (TimedOut, Unavailable):
                if loop.time() >= deadline:
                    raise

    async def _resolve(self, request: pb.ResolveRequest, timeout_s: float) -> Entries:
        what = f"resolve {request.name or request.prefix or '/'}"
        reply: pb.ResolveReply = await self._link.call(
            what,
            lambda stub, attempt_s: stub.Resolve(
                request, timeout=request.wait_s + ATTEMPT_S if request.wait_s else attempt_s
            ),
            timeout_s,
        )
        return [entry_from_wire(entry, self.run) for entry in reply.entries]

    async def watch(self, prefix: str = "") -> AsyncGenerator[NameEvent, None]:
        """A snapshot, then every change at or below a prefix, in order, for ever."""
        revision = 0

        def make(stub: Any) -> Any:
            return stub.Watch(pb.WatchRequest(prefix=self._absolute(prefix), from_revision=revision))

        async with aclosing(self._link.stream(f"watch {self._absolute(prefix) or '/'}", make)) as replies:
            async for reply in replies:
                revision = reply.revision
                for event in events_from_wire(reply, self.run):
                    yield event

    async def publish_version(self, version: PolicyVersion, manifest_sha256: str, fencing_token: int) -> None:
        """Make a version the run's current one.

        Raises:
            StaleVersion: A later version or a later leader exists; the message names it.
        """
        request = pb.PublishVersionRequest(
            run=self.run, version=version_to_wire(version), manifest_sha256=manifest_sha256, fencing_token=fencing_token
        )
        await self._link.call(
            f"publish {version.label}",
            lambda stub, timeout_s: stub.PublishVersion(request, timeout=timeout_s),
            TIMEOUT_S,
        )

    async def get_version(self) -> VersionRecord | None:
        """The run's current version; None before the first publication."""
        request = pb.GetVersionRequest(run=self.run)
        try:
            reply: pb.VersionRecord = await self._link.call(
                "get the version", lambda stub, timeout_s: stub.GetVersion(request, timeout=timeout_s), TIMEOUT_S
            )
        except NotFound:
            return None
        return version_record_from_wire(reply)

    async def list_versions(self, prefix: str = "") -> Sequence[VersionRecord]:
        """The current version of every run at or below a prefix (not below the client's run)."""
        request = pb.ListVersionsRequest(prefix=prefix)
        reply: pb.ListVersionsReply = await self._link.call(
            "list versions", lambda stub, timeout_s: stub.ListVersions(request, timeout=timeout_s), TIMEOUT_S
        )
        return [version_record_from_wire(record) for record in reply.records]

    async def watch_versions(self) -> AsyncGenerator[VersionRecord, None]:
        """The run's current version if there is one, then each newer one as it is published; never backwards."""
        last: VersionRecord | None = None
        revision = 0

        def make(stub: Any) -> Any:
            seen = last.sequence if last else 0
            return stub.WatchVersion(pb.WatchVersionRequest(run=self.run, from_revision=revision, after_sequence=seen))

        async with aclosing(self._link.stream(f"watch the versions of {self.run}", make)) as replies:
            async for reply in replies:
                revision = reply.revision
                record = version_record_from_wire(reply.record, reply.has_gap)
                if last is None or record.version > last.version:
                    last = record
                    yield record

    def campaign(
        self, office: str, candidate: str, *, ttl_s: float = 10.0, timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[Leadership]:
        """Lead an office of the run for as long as the block runs; entering it waits for the election.

        Args:
            office: "trainer": its leader alone may publish versions of the run.
            candidate: Who stands, shown to people.
            ttl_s: Leadership lapses when this process was silent for so long, seconds.
            timeout_s: Longest wait for the election, seconds; None: as long as it takes.

        Raises:
            TimedOut: Somebody else leads still; the message says who.
        """
        name = self._absolute(f"leader/{office.removeprefix('leader/')}")
        return Candidature(self._link, self._keeper, name, candidate, ttl_s).held(timeout_s)

    def _absolute(self, name: str) -> str:
        return "/".join(part for part in (self.run, name.strip("/")) if part)
