"""Faults of a real etcd: what was acknowledged stays, watches neither lose nor double, and what fails says why."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from etcd3aio import AlarmType

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError, Overloaded, StaleVersion
from headway.runtime.names import NameClient, Put, Removed, Snapshot
from headway.runtime.service import Placement
from headway.testing.etcd import EtcdCluster, EtcdNode, forgets_when_killed, running_etcd
from services.name_resolve.app import serve
from services.name_resolve.etcd import EtcdStore, Login, Member
from services.name_resolve.keys import NAMES
from services.name_resolve.store import Changes
from services.name_resolve.store import Put as StorePut

RUN = "exp/trial"
MANIFEST = "a" * 64
DEADLINE_S = 100.0
remembers = pytest.mark.skipif(forgets_when_killed(), reason="etcd 3.5.0 to 3.5.2 lose acknowledged writes when killed")


@asynccontextmanager
async def serving(endpoints: str, port: int = 0) -> AsyncIterator[str]:
    """The service over an etcd; the address of it."""
    async with serve(EtcdStore(endpoints.split(",")), Placement(grpc_port=port)) as running:
        yield f"127.0.0.1:{running.ports['grpc']}"


@dataclass
class Writer:
    """Registers one name after the other, and remembers which were acknowledged."""

    names: NameClient
    prefix: str
    acknowledged: list[str] = field(default_factory=list)
    is_stopped: bool = False

    async def run(self) -> None:
        index = 0
        while not self.is_stopped:
            name, index = f"{self.prefix}/{index}", index + 1
            try:
                await self.names.register(name, str(index), ttl_s=0)
            except HeadwayError:
                continue
            self.acknowledged.append(name)

    async def reaches(self, count: int) -> None:
        while len(self.acknowledged) < count:  # noqa: ASYNC110 - a condition, under the test's deadline
            await asyncio.sleep(0.01)


@dataclass
class Watcher:
    """Follows a prefix, and remembers every event."""

    names: NameClient
    prefix: str
    events: list[tuple[str, int]] = field(default_factory=list)
    num_snapshots: int = 0
    is_watching: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with aclosing(self.names.watch(self.prefix)) as events:
            async for event in events:
                if isinstance(event, Put):
                    self.events.append((event.entry.name, event.entry.revision))
                elif isinstance(event, Snapshot):
                    self.num_snapshots += 1
                    self.is_watching.set()

    async def has_seen(self, name: str) -> None:
        while name not in {seen for seen, _ in self.events}:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.02)


async def history_of(endpoints: str, prefix: str) -> list[tuple[str, int]]:
    """Every put below a prefix, as etcd itself tells it from its first revision."""
    root = f"{NAMES}{RUN}/"
    async with EtcdStore(endpoints.split(",")).open() as store:
        newest = (await store.below(f"{root}{prefix}/")).items
        last = max(item.revision for item in newest)
        puts: list[tuple[str, int]] = []
        async with aclosing(store.watch(f"{root}{prefix}/", 1)) as news:
            async for batch in news:
                assert isinstance(batch, Changes)
                puts += [
                    (c.key.removeprefix(root).removesuffix("/"), c.revision)
                    for c in batch.changes
                    if c.item is not None
                ]
                if batch.revision >= last:
                    return puts
    raise AssertionError("the watch ended")


@dataclass
class Work:
    """Three writers and a watcher."""

    names: NameClient
    writers: list[Writer]
    watcher: Watcher
    writing: asyncio.Future[list[None]]

    async def goes_on(self, count: int) -> None:
        """Wait until each writer has had so many more names acknowledged."""
        for writer, goal in [(writer, len(writer.acknowledged) + count) for writer in self.writers]:
            await writer.reaches(goal)

    async def stop(self) -> None:
        for writer in self.writers:
            writer.is_stopped = True
        await self.writing


async def check_nothing_was_lost(endpoints: str, work: Work) -> None:
    """Every acknowledged name is there, and the watcher saw exactly etcd's own history."""
    await work.stop()
    names, writers, watcher = work.names, work.writers, work.watcher
    present = {entry.name for entry in await names.list("k")}
    for writer in writers:
        assert set(writer.acknowledged) <= present
    await watcher.has_seen(max(await names.list("k"), key=lambda entry: entry.revision).name)
    assert watcher.num_snapshots == 1
    assert watcher.events == await history_of(endpoints, "k")


@asynccontextmanager
async def under_writes(address: str) -> AsyncIterator[Work]:
    """Three writers and a watcher that work while the block runs."""
    async with asyncio.timeout(DEADLINE_S), NameClient(address, RUN) as names:
        watcher = Watcher(names, "k")
        watching = asyncio.create_task(watcher.run())
        await watcher.is_watching.wait()
        writers = [Writer(names, f"k/{letter}") for letter in "abc"]
        writing = asyncio.gather(*(writer.run() for writer in writers))
        try:
            yield Work(names, writers, watcher, writing)
        finally:
            writing.cancel()
            watching.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)


async def restart(node: EtcdNode) -> None:
    node.kill()
    node.start()
    await asyncio.to_thread(node.wait_ready)


@remembers
async def test_killing_etcd_under_writes_loses_no_acknowledged_name_and_no_event() -> None:
    with running_etcd() as cluster:
        async with serving(cluster.endpoints) as address, under_writes(address) as work:
            for _ in range(3):
                await work.goes_on(30)
                await restart(cluster.nodes[0])
            await work.goes_on(10)
            await check_nothing_was_lost(cluster.endpoints, work)


async def test_reads_that_are_cancelled_do_no_harm_to_etcd() -> None:
    with running_etcd() as cluster:
        async with asyncio.timeout(DEADLINE_S), EtcdStore([cluster.endpoints]).open() as store:
            keys = [f"/headway/names/{index}/" for index in range(40)]
            for key in keys:
                await store.transact([], [StorePut(key, b"x" * 2000)])
            for round_ in range(100):
                reads = [asyncio.ensure_future(store.get(*keys)) for _ in range(10)]
                await asyncio.sleep(round_ % 20 * 0.0005)
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)
            assert len((await store.get(*keys)).items) == 40


async def leader_of(cluster: EtcdCluster) -> EtcdNode:
    for node in cluster.nodes:
        member = Member(node.endpoint, Login())
        status = await member.maintenance.status()
        await member.channel.close()
        if status.leader == status.header.member_id:
            return node
    raise AssertionError("no node leads")


@remembers
@pytest.mark.slow
async def test_a_cluster_that_loses_its_leader_goes_on_without_loss() -> None:
    with running_etcd(3) as cluster:
        async with serving(cluster.endpoints) as address, under_writes(address) as work:
            for _ in range(2):
                await work.goes_on(20)
                leader = await leader_of(cluster)
                leader.kill()
                await work.goes_on(20)
                await restart(leader)
            await check_nothing_was_lost(cluster.endpoints, work)


async def test_a_frozen_member_does_not_stop_the_service() -> None:
    with running_etcd(3) as cluster:
        async with serving(cluster.endpoints) as address, under_writes(address) as work:
            leader = await leader_of(cluster)
            await work.goes_on(20)
            leader.freeze()
            await work.goes_on(20)
            leader.thaw()
            await check_nothing_was_lost(cluster.endpoints, work)


async def test_after_a_freeze_longer_than_its_lease_a_service_is_registered_again() -> None:
    with running_etcd() as cluster:
        async with (
            asyncio.timeout(DEADLINE_S),
            serving(cluster.endpoints) as address,
            NameClient(address, RUN) as names,
            names.campaign("trainer", "first", ttl_s=2.0) as first,
        ):
            await names.register("services/reward/0", "here", ttl_s=2.0)
            await names.publish_version(PolicyVersion(first.term, 0), MANIFEST, first.fencing_token)
            cluster.nodes[0].freeze()
            await first.lost.wait()
            cluster.nodes[0].thaw()
            await names.wait("services/reward", timeout_s=DEADLINE_S)
            async with names.campaign("trainer", "second", ttl_s=2.0, timeout_s=DEADLINE_S) as second:
                with pytest.raises(StaleVersion, match="second does, in term 2"):
                    await names.publish_version(PolicyVersion(first.term, 1), MANIFEST, first.fencing_token)
                await names.publish_version(PolicyVersion(second.term, 1), MANIFEST, second.fencing_token)


async def test_a_watch_whose_revision_was_compacted_starts_again_from_a_snapshot() -> None:
    with running_etcd() as cluster:
        async with asyncio.timeout(DEADLINE_S), aclosing(events_over_a_restart(cluster)) as events:
            first, after = await anext(events), await anext(events)
            assert isinstance(first, Snapshot)
            assert isinstance(after, Snapshot)
            assert [entry.name for entry in after.entries] == ["c/new"]
            assert await anext(events) == Removed("c/new")


async def events_over_a_restart(cluster: EtcdCluster) -> AsyncIterator[Snapshot | Put | Removed]:
    """A watch during which the service goes, etcd changes and forgets, and the service comes back."""
    async with serving(cluster.endpoints) as address, NameClient(address, RUN) as names:
        await names.register("c/old", "x", ttl_s=0)
        client = NameClient(address, RUN)
    port = int(address.rpartition(":")[2])
    async with client, aclosing(client.watch("c")) as events:
        async with serving(cluster.endpoints, port):
            yield await anext(events)
        async with serving(cluster.endpoints) as elsewhere, NameClient(elsewhere, RUN) as names:
            await names.deregister("c/old")
            await names.register("c/new", "x", ttl_s=0)
        await compact(cluster)
        async with serving(cluster.endpoints, port):
            yield await anext(events)
            await client.deregister("c/new")
            yield await anext(events)


async def compact(cluster: EtcdCluster) -> None:
    member = Member(cluster.nodes[0].endpoint, Login())
    revision = (await member.kv.get("none")).header.revision
    await member.kv.compact(revision, physical=True)
    await member.channel.close()


async def test_a_full_etcd_says_so_still_answers_and_accepts_again_when_there_is_room() -> None:
    with running_etcd(flags=["--quota-backend-bytes=2097152"]) as cluster:
        async with (
            asyncio.timeout(DEADLINE_S),
            serving(cluster.endpoints) as address,
            NameClient(address, RUN) as names,
        ):
            await names.register("services/a", "here", ttl_s=10.0)
            with pytest.raises(Overloaded, match="space"):
                await fill(names)
            assert (await names.get("services/a")).value == "here"
            await names.clear("fill")
            await make_room(cluster)
            await names.register("services/b", "there", ttl_s=2.0)


async def fill(names: NameClient) -> None:
    for index in range(64):
        await names.register(f"fill/{index % 2}", "x" * 500_000, ttl_s=0)


async def make_room(cluster: EtcdCluster) -> None:
    """What an operator does: compact, defragment, disarm."""
    await compact(cluster)
    member = Member(cluster.nodes[0].endpoint, Login())
    maintenance = member.maintenance
    await maintenance.defragment()
    for alarm in (await maintenance.alarms()).alarms:
        await maintenance.alarm_deactivate(AlarmType.NOSPACE, member_id=alarm.memberID)
    await member.channel.close()
