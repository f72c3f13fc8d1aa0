"""Replicas of name-resolve, and leaders, are killed, frozen and asked to end: clients go on, and offices are filled."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.core.version import PolicyVersion
from headway.errors import StaleVersion, TimedOut
from headway.runtime.names import NameClient, Put, Snapshot
from headway.runtime.service import READY_PREFIX
from headway.testing.etcd import EtcdCluster, running_etcd
from services.name_resolve.etcd import Login, Member

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MANIFEST = "a" * 64
DEADLINE_S = 100.0


@dataclass
class Child:
    """A process of ours."""

    process: asyncio.subprocess.Process
    address: str = ""

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        return await self.process.wait()


@asynccontextmanager
async def child(*words: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def replica(etcd: EtcdCluster, port: int = 0) -> AsyncIterator[Child]:
    words = ["-m", "services.name_resolve", "--config", str(CONFIG), "--grpc-port", str(port)]
    overrides = ["cluster.name_resolve.type=etcd3", f"cluster.name_resolve.etcd3_addr={etcd.endpoints}"]
    async with child(*words, *overrides) as started:
        ready = json.loads((await line_of(started.process)).removeprefix(READY_PREFIX))
        started.address = f"127.0.0.1:{ready['ports']['grpc']}"
        yield started


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with running_etcd(flags=["--unsafe-no-fsync"]) as cluster:
        yield cluster


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return f"exp/{request.node.name}"


async def test_killing_one_replica_after_the_other_loses_no_name_and_no_event(etcd: EtcdCluster, run: str) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(replica(etcd)) for _ in range(2)]
        names = await stack.enter_async_context(NameClient(",".join(each.address for each in replicas), run))
        events = await stack.enter_async_context(aclosing(names.watch("k")))
        assert isinstance(await anext(events), Snapshot)
        await names.register("kept", "x", ttl_s=4.0)
        before = await names.get("kept")
        for round_ in range(2):
            victim = replicas[round_]
            victim.signal(signal.SIGKILL)
            await victim.ended()
            await names.register(f"k/{round_}", "x")
            port = int(victim.address.rpartition(":")[2])
            replicas[round_] = await stack.enter_async_context(replica(etcd, port))
        seen = [await anext(events) for _ in range(2)]
        assert [event.entry.name for event in seen if isinstance(event, Put)] == ["k/0", "k/1"]
        assert await names.get("kept") == before


async def test_a_leader_stays_leader_when_the_replica_behind_its_stream_is_killed(etcd: EtcdCluster, run: str) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        first = await stack.enter_async_context(replica(etcd))
        names = await stack.enter_async_context(NameClient(first.address, run))
        leadership = await stack.enter_async_context(names.campaign("trainer", "first"))
        await names.publish_version(PolicyVersion(1, 0), MANIFEST, leadership.fencing_token)
        first.signal(signal.SIGKILL)
        await first.ended()
        await stack.enter_async_context(replica(etcd, int(first.address.rpartition(":")[2])))
        await names.publish_version(PolicyVersion(1, 1), MANIFEST, leadership.fencing_token)
        with pytest.raises(TimedOut, match="first leads"):
            async with names.campaign("trainer", "second", timeout_s=0.5):
                pass
        assert not leadership.lost.is_set()


async def test_a_replica_that_is_asked_to_end_does_so_and_gives_up_what_its_streams_held(
    etcd: EtcdCluster, run: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), replica(etcd) as ending, replica(etcd) as other:
        async with NameClient(ending.address, run) as names, NameClient(other.address, run) as rival:
            async with names.campaign("trainer", "first", ttl_s=300.0) as first:
                ending.signal(signal.SIGTERM)
                assert await ending.ended() == 0
                async with rival.campaign("trainer", "second", ttl_s=300.0) as second:
                    assert second.term == first.term + 1


LEADER = """
import asyncio, sys
from headway.runtime.names import NameClient

async def lead():
    async with NameClient(sys.argv[1], sys.argv[2]) as names:
        async with names.campaign("trainer", "child", ttl_s=float(sys.argv[3])) as leadership:
            print(leadership.fencing_token, flush=True)
            await asyncio.Event().wait()

asyncio.run(lead())
"""


async def test_the_office_of_a_killed_leader_is_filled_at_once(etcd: EtcdCluster, run: str) -> None:
    async with asyncio.timeout(DEADLINE_S), replica(etcd) as server, NameClient(server.address, run) as names:
        async with child("-c", LEADER, server.address, run, "300") as leader:
            token = int(await line_of(leader.process))
            leader.signal(signal.SIGKILL)
            async with names.campaign("trainer", "next") as following:
                assert following.fencing_token > token


async def test_the_office_of_a_frozen_leader_is_filled_when_its_lease_lapses(etcd: EtcdCluster, run: str) -> None:
    async with asyncio.timeout(DEADLINE_S), replica(etcd) as server, NameClient(server.address, run) as names:
        async with child("-c", LEADER, server.address, run, "2") as leader:
            token = int(await line_of(leader.process))
            leader.signal(signal.SIGSTOP)
            async with names.campaign("trainer", "next") as following:
                with pytest.raises(StaleVersion, match="next does, in term 2"):
                    await names.publish_version(PolicyVersion(1, 0), MANIFEST, token)
                await names.publish_version(PolicyVersion(2, 0), MANIFEST, following.fencing_token)


async def test_version_watchers_go_on_over_a_restart_and_a_gap_is_marked(etcd: EtcdCluster, run: str) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        first = await stack.enter_async_context(replica(etcd))
        other = await stack.enter_async_context(replica(etcd))
        names = await stack.enter_async_context(NameClient(first.address, run))
        elsewhere = await stack.enter_async_context(NameClient(other.address, run))
        versions = await stack.enter_async_context(aclosing(names.watch_versions()))
        await names.publish_version(PolicyVersion(1, 0), MANIFEST, 1)
        seen = [await anext(versions)]
        for forgets, steps in ((False, (1, 2)), (True, (3, 4))):
            first.signal(signal.SIGKILL)
            await first.ended()
            for step in steps:
                await elsewhere.publish_version(PolicyVersion(1, step), MANIFEST, 1)
            if forgets:
                await compact(etcd)
            first = await stack.enter_async_context(replica(etcd, int(first.address.rpartition(":")[2])))
            seen += [await anext(versions) for _ in range(1 if forgets else 2)]
        assert [(record.version.step, record.has_gap) for record in seen] == [
            (0, False),
            (1, False),
            (2, False),
            (4, True),
        ]


async def compact(cluster: EtcdCluster) -> None:
    member = Member(cluster.endpoints, Login())
    await member.kv.compact((await member.kv.get("none")).header.revision, physical=True)
    await member.channel.close()
