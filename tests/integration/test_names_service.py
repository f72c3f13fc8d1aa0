"""A client and the service over real gRPC, on each store: names, versions and leadership mean what they say."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest

from headway.core.version import PolicyVersion
from headway.errors import AlreadyExists, InvalidInput, NotFound, StaleVersion, TimedOut
from headway.runtime.names import NameClient, Put, Removed, Snapshot
from headway.runtime.service import Placement
from headway.testing.etcd import EtcdCluster, running_etcd
from headway.v1 import name_resolve_pb2 as pb
from services.name_resolve.app import serve
from services.name_resolve.etcd import EtcdStore
from services.name_resolve.memory import MemoryStore
from services.name_resolve.store import Store

MANIFEST, OTHER_MANIFEST = "a" * 64, "b" * 64
DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with running_etcd(flags=["--unsafe-no-fsync"]) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd3"])
async def address(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    store: Store = MemoryStore()
    if request.param == "etcd3":
        store = EtcdStore([request.getfixturevalue("etcd").endpoints])
    async with serve(store, Placement()) as running:
        yield f"127.0.0.1:{running.ports['grpc']}"


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return f"exp/{abs(hash(request.node.nodeid))}"


@pytest.fixture
async def names(address: str, run: str) -> AsyncIterator[NameClient]:
    async with NameClient(address, run) as client:
        yield client


@asynccontextmanager
async def within(seconds: float = DEADLINE_S) -> AsyncIterator[None]:
    async with asyncio.timeout(seconds):
        yield


async def test_a_service_is_found_with_its_metadata_until_it_closes(names: NameClient) -> None:
    reward = await names.register("services/reward/0", "10.0.0.7:4711", metadata={"pid": "12"})
    entry = await names.get("services/reward/0")
    assert (entry.name, entry.value, dict(entry.metadata)) == ("services/reward/0", "10.0.0.7:4711", {"pid": "12"})
    await reward.update(metadata={"pid": "13"})
    again = await names.get("services/reward/0")
    assert dict(again.metadata) == {"pid": "13"}
    assert again.create_revision == entry.create_revision < again.revision
    await reward.close()
    with pytest.raises(NotFound, match="services/reward/0"):
        await names.get("services/reward/0")


async def test_names_come_in_the_order_of_names_and_only_of_this_run(names: NameClient, address: str) -> None:
    async with NameClient(address, f"{names.run}0") as neighbour:
        await neighbour.register("services/x", "other run")
        for instance in ("2", "10", "1"):
            await names.register(f"services/a/{instance}", instance)
        await names.register("services/ab/0", "x")
        assert [entry.name for entry in await names.list("services/a")] == [
            "services/a/1",
            "services/a/10",
            "services/a/2",
        ]
        assert len(await names.list()) == 4


async def test_a_taken_name_is_refused_and_says_by_whom(names: NameClient, address: str) -> None:
    mine = await names.register("lock", "me", replace=False)
    async with NameClient(address, names.run) as other:
        with pytest.raises(AlreadyExists, match="'me'"):
            await other.register("lock", "you", replace=False)
        await mine.close()
        await other.register("lock", "you", replace=False)
        assert (await names.get("lock")).value == "you"


async def test_a_name_that_was_replaced_is_not_taken_back_by_its_former_owner(names: NameClient) -> None:
    first = await names.register("role", "first")
    second = await names.register("role", "second")
    await first.close()
    assert (await names.get("role")).value == "second"
    await second.close()


async def test_bad_names_are_refused(names: NameClient) -> None:
    for name in ("a//b", "a/../b", "a\nb", "a/./b"):
        with pytest.raises(InvalidInput):
            await names.register(name, "x")


async def test_waiting_ends_when_enough_are_there(names: NameClient) -> None:
    waiting = asyncio.create_task(names.wait("services/inference", min_entries=2, timeout_s=DEADLINE_S))
    await names.register("services/inference/0", "http://a")
    await names.register("services/inference/1", "http://b")
    assert [entry.value for entry in await waiting] == ["http://a", "http://b"]


async def test_waiting_in_vain_says_what_was_missing(names: NameClient) -> None:
    await names.register("services/inference/0", "http://a")
    with pytest.raises(TimedOut, match=r"2 names at .*services/inference; there are 1"):
        await names.wait("services/inference", min_entries=2, timeout_s=0.2)


async def test_a_watch_begins_with_what_is_there_and_goes_on_with_what_happens(names: NameClient) -> None:
    first = await names.register("w/0", "0")
    async with within(), aclosing(names.watch("w")) as events:
        snapshot = await anext(events)
        assert isinstance(snapshot, Snapshot)
        assert [entry.name for entry in snapshot.entries] == ["w/0"]
        second = await names.register("w/1", "1")
        await second.update(value="2")
        await first.close()
        seen = [await anext(events) for _ in range(3)]
    assert [event.entry.value if isinstance(event, Put) else event for event in seen] == ["1", "2", Removed("w/0")]


async def test_a_name_lapses_when_its_owner_is_silent_and_not_before(address: str, names: NameClient) -> None:
    kept = await names.register("l/kept", "x", ttl_s=3.0)
    silent = NameClient(address, names.run)
    async with within(), silent, aclosing(names.watch("l")) as events:
        await anext(events)
        await silent.register("l/silent", "x", ttl_s=3.0)
        silent._keeping.cancel()  # type: ignore[union-attr]
        assert isinstance(await anext(events), Put)
        assert await anext(events) == Removed("l/silent")
        assert [entry.name for entry in await names.list("l")] == ["l/kept"]
        silent._registrations.clear()
    await kept.close()


async def test_a_client_whose_lease_was_lost_registers_again(names: NameClient) -> None:
    registration = await names.register("again", "x", ttl_s=3.0)
    async with within(), aclosing(names.watch("again")) as events:
        await anext(events)
        await names.deregister("again")
        await names._remove(pb.DeregisterRequest(lease_id=registration._lease.lease_id))
        assert await anext(events) == Removed("again")
        back = await anext(events)
    assert isinstance(back, Put)
    assert back.entry.value == "x"


async def test_versions_only_grow_and_each_names_one_manifest(names: NameClient) -> None:
    assert await names.get_version() is None
    await names.publish_version(PolicyVersion(1, 0), MANIFEST, fencing_token=5)
    await names.publish_version(PolicyVersion(1, 0), MANIFEST, fencing_token=5)
    with pytest.raises(StaleVersion, match=r"v1\.0 is published with another manifest"):
        await names.publish_version(PolicyVersion(1, 0), OTHER_MANIFEST, fencing_token=5)
    await names.publish_version(PolicyVersion(1, 2), OTHER_MANIFEST, fencing_token=5)
    with pytest.raises(StaleVersion, match=r"v1\.1 is not newer than the current version, v1\.2"):
        await names.publish_version(PolicyVersion(1, 1), MANIFEST, fencing_token=5)
    with pytest.raises(StaleVersion, match="token 4 is older than 5"):
        await names.publish_version(PolicyVersion(2, 0), MANIFEST, fencing_token=4)
    record = await names.get_version()
    assert record is not None
    assert (record.version, record.manifest_sha256, record.sequence) == (PolicyVersion(1, 2), OTHER_MANIFEST, 2)


async def test_watchers_see_every_version_in_order(names: NameClient) -> None:
    await names.publish_version(PolicyVersion(1, 0), MANIFEST, 1)
    async with within(), aclosing(names.watch_versions()) as versions:
        seen = [await anext(versions)]
        for step in range(1, 20):
            await names.publish_version(PolicyVersion(1, step), MANIFEST, 1)
        seen += [await anext(versions) for _ in range(19)]
    assert [record.version.step for record in seen] == list(range(20))
    assert not any(record.has_gap for record in seen)


async def test_one_candidate_leads_and_the_next_follows_when_it_leaves(names: NameClient, address: str) -> None:
    async with within(), NameClient(address, names.run) as rival:
        async with names.campaign("trainer", "first") as first:
            assert first.term == 1
            with pytest.raises(TimedOut, match="first leads"):
                async with rival.campaign("trainer", "second", timeout_s=0.3):
                    pass
            following = asyncio.create_task(enter(rival, "second"))
        second, leave = await following
        assert second.term == 2
        assert second.fencing_token > first.fencing_token
        await leave()


async def enter(client: NameClient, candidate: str):  # type: ignore[no-untyped-def]
    campaign = client.campaign("trainer", candidate)
    leadership = await campaign.__aenter__()

    async def leave() -> None:
        await campaign.__aexit__(None, None, None)

    return leadership, leave


async def test_only_the_leader_publishes_and_a_former_one_does_not(names: NameClient, address: str) -> None:
    async with within(), names.campaign("trainer", "first") as first:
        await names.publish_version(PolicyVersion(1, 0), MANIFEST, first.fencing_token)
        with pytest.raises(InvalidInput, match="not of term 1"):
            await names.publish_version(PolicyVersion(2, 0), MANIFEST, first.fencing_token)
    async with within(), names.campaign("trainer", "second") as second:
        with pytest.raises(StaleVersion, match="second does, in term 2"):
            await names.publish_version(PolicyVersion(1, 1), MANIFEST, first.fencing_token)
        await names.publish_version(PolicyVersion(second.term, 0), MANIFEST, second.fencing_token)


async def test_a_leader_learns_that_its_leadership_is_over(names: NameClient) -> None:
    async with within(), names.campaign("trainer", "first") as first:
        await names.clear("leader")
        await first.lost.wait()


async def test_clearing_a_run_keeps_its_terms(names: NameClient) -> None:
    async with within(), names.campaign("trainer", "first") as first:
        await names.publish_version(PolicyVersion(1, 0), MANIFEST, first.fencing_token)
    await names.register("services/x", "y", ttl_s=0)
    assert await names.clear("", with_versions=True) == 2
    assert await names.list() == []
    assert await names.get_version() is None
    async with within(), names.campaign("trainer", "second") as second:
        assert second.term == 2


async def test_every_run_s_version_is_listed(names: NameClient) -> None:
    await names.publish_version(PolicyVersion(3, 4), MANIFEST, 1)
    records = await names.list_versions(names.run)
    assert [(record.run, record.version.label) for record in records] == [(names.run, "v3.4")]
