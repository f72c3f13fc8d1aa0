"""Random schedules against two replicas over an etcd that is killed and frozen: what callers saw could have happened.

Names behave as linearizable registers. Of the leaders of a run, each publication that took effect was made with the
token of the last election before it; versions only grew; what was answered "ok" took effect once, a refusal never.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError
from headway.runtime.grpc_client import connect
from headway.runtime.names import NameClient
from headway.runtime.service import Placement
from headway.runtime.wire import version_to_wire
from headway.testing.etcd import EtcdCluster, forgets_when_killed, running_etcd
from headway.testing.histories import LATER_THAN_ALL, Call, explain, register_model
from headway.v1 import name_resolve_pb2 as pb
from headway.v1.name_resolve_pb2_grpc import NameResolveStub
from services.name_resolve.app import serve
from services.name_resolve.etcd import EtcdStore
from services.name_resolve.keys import (
    ROOT,
    TERMS,
    TRAINER_OFFICE,
    VERSIONS,
    Leadership,
    Published,
    key_of,
    leadership_of,
    published_of,
)
from services.name_resolve.store import Change, View

NUM_REGISTERS, NUM_ELECTIONS, NUM_AT_ONCE = 200, 80, 16
NUM_CLIENTS, NUM_CALLS = 4, 6
REFUSED = (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
UNANSWERED = object()
DEADLINE_S = 300.0


@dataclass
class History:
    """The calls of one schedule."""

    run: str
    calls: list[Call] = field(default_factory=list)

    async def record(self, kind: str, argument: object, make: Callable[[], Awaitable[object]]) -> object:
        """Make a call once, and write down what came of it."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        try:
            answer = await make()
        except grpc.aio.AioRpcError as error:
            answer = "refused" if error.code() in REFUSED else UNANSWERED
        if answer is not UNANSWERED:
            self.calls.append(Call(kind, argument, answer, begin, clock()))
        elif kind != "read":
            self.calls.append(Call(kind, argument, None, begin, LATER_THAN_ALL))
        return answer


@dataclass
class World:
    """An etcd, two replicas in front of it, and raw stubs to both, which never try again."""

    cluster: EtcdCluster
    addresses: list[str] = field(default_factory=list)
    stubs: list[NameResolveStub] = field(default_factory=list)
    replicas: list[AsyncExitStack] = field(default_factory=list)

    async def start(self, index: int, port: int = 0) -> str:
        store = EtcdStore([self.cluster.endpoints], timeout_s=3.0)
        stack = AsyncExitStack()
        running = await stack.enter_async_context(serve(store, Placement(grpc_port=port)))
        self.replicas[index : index + 1] = [stack]
        return f"127.0.0.1:{running.ports['grpc']}"


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    with running_etcd() as cluster:
        made = World(cluster)
        made.addresses = [await made.start(index) for index in range(2)]
        channels = [connect(address) for address in made.addresses]
        made.stubs = [NameResolveStub(channel) for channel in channels]
        try:
            yield made
        finally:
            for stack in made.replicas:
                await stack.aclose()
            for channel in channels:
                await channel.close()


async def trouble(there: World, chance: random.Random) -> None:
    """Freeze etcd, kill it where it remembers, or replace a replica, again and again."""
    node = there.cluster.nodes[0]
    while True:
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        what = chance.choice(
            ["freeze", "freeze", "freeze long", "replica", *([] if forgets_when_killed() else ["kill"])]
        )
        if what.startswith("freeze"):
            node.freeze()
            try:
                await asyncio.sleep(3.0 if what == "freeze long" else chance.uniform(0.05, 0.5))
            finally:
                node.thaw()
        elif what == "kill":
            node.kill()
            node.start()
            await asyncio.to_thread(node.wait_ready)
        else:
            index = chance.randrange(2)
            await there.replicas[index].aclose()
            await there.start(index, int(there.addresses[index].rpartition(":")[2]))


async def use_register(there: World, run: str, chance: random.Random) -> History:
    """A few clients that write, create, delete and read one name, each one call at a time."""
    history = History(run)
    seeds = [chance.random() for _ in range(NUM_CLIENTS)]
    await asyncio.gather(
        *(use_as_client(there, history, index, random.Random(seed)) for index, seed in enumerate(seeds))
    )
    return history


async def use_as_client(there: World, history: History, client: int, chance: random.Random) -> None:
    name = f"{history.run}/x"
    for index in range(NUM_CALLS):
        stub, value = chance.choice(there.stubs), f"{client}.{index}"
        timeout_s = chance.choice([0.002, 5.0, 5.0, 5.0, 5.0])
        kind = chance.choice(["write", "create", "delete", "read", "read"])

        async def make(stub=stub, value=value, kind=kind, timeout_s=timeout_s) -> object:  # type: ignore[no-untyped-def]
            if kind == "read":
                reply = await stub.Resolve(pb.ResolveRequest(prefix=name), timeout=timeout_s)
                return reply.entries[0].value if reply.entries else "absent"
            if kind == "delete":
                await stub.Deregister(pb.DeregisterRequest(name=name), timeout=timeout_s)
            else:
                request = pb.RegisterRequest(name=name, value=value, replace=kind == "write")
                await stub.Register(request, timeout=timeout_s)
            return "ok"

        await history.record(kind, value, make)
        await asyncio.sleep(chance.choice([0.0, 0.0, 0.01, 0.1]))


async def fight_for_office(there: World, run: str, chance: random.Random) -> History:
    """Candidates that are elected, publish, and go on publishing when they no longer lead."""
    history = History(run)
    seeds = [chance.random() for _ in range(3)]
    await asyncio.gather(*(stand(there, history, f"c{index}", random.Random(seed)) for index, seed in enumerate(seeds)))
    return history


async def stand(there: World, history: History, candidate: str, chance: random.Random) -> None:
    async with NameClient(",".join(there.addresses), history.run) as names:
        for _ in range(2):
            try:
                async with names.campaign("trainer", candidate, ttl_s=2.0, timeout_s=20.0) as leadership:
                    await publish_some(there, history, leadership.term, leadership.fencing_token, chance)
                    if chance.random() < 0.3:
                        names._keeper._leases.clear()  # falls silent
                        await asyncio.sleep(chance.uniform(0.0, 3.0))
                await publish_some(there, history, leadership.term, leadership.fencing_token, chance)
            except HeadwayError:
                continue


async def publish_some(there: World, history: History, term: int, token: int, chance: random.Random) -> None:
    """Read the current version, publish the next step of this term, with a manifest that nobody else has."""
    for _ in range(chance.randint(1, 3)):
        stub = chance.choice(there.stubs)

        async def read(stub=stub) -> object:  # type: ignore[no-untyped-def]
            try:
                record = await stub.GetVersion(pb.GetVersionRequest(run=history.run), timeout=4.0)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return "absent"
                raise
            return PolicyVersion(record.version.term, record.version.step)

        current = await history.record("read", None, read)
        if not isinstance(current, PolicyVersion):
            current = PolicyVersion(0, 0)
        version = PolicyVersion(term, current.step + 1)
        manifest = hashlib.sha256(chance.randbytes(8)).hexdigest()

        async def publish(stub=stub, version=version, manifest=manifest) -> object:  # type: ignore[no-untyped-def]
            request = pb.PublishVersionRequest(
                run=history.run, version=version_to_wire(version), manifest_sha256=manifest, fencing_token=token
            )
            await stub.PublishVersion(request, timeout=chance.choice([0.003, 4.0, 4.0, 4.0]))
            return "ok"

        await history.record("publish", (version, manifest, token), publish)


def version_model(state: object, call: Call) -> tuple[bool, object]:
    """A version that only grows. A refusal fits every state: it may have been for the token."""
    if call.kind == "read":
        return call.answer == (state or "absent"), state
    version = call.argument[0]
    could = call.answer != "refused" and (state is None or version > state)
    return could or call.answer != "ok", version if could else state


async def everything_that_happened(endpoint: str) -> list[Change]:
    """etcd's whole history."""
    async with EtcdStore([endpoint]).open() as store:
        newest = max(item.revision for item in (await store.below(ROOT)).items)
        changes: list[Change] = []
        async with aclosing(store.watch(ROOT, 1)) as news:
            async for batch in news:
                assert not isinstance(batch, View)
                changes += batch.changes
                if batch.revision >= newest:
                    return changes
    raise AssertionError("the watch ended")


def check_leaders(history: History, changes: list[Change]) -> int:
    """Hold one run's publications against its elections; how many took effect."""
    version_key, term_key = key_of(VERSIONS, history.run), key_of(TERMS, f"{history.run}/{TRAINER_OFFICE}")
    leader: Leadership | None = None
    effective: list[Published] = []
    for change in changes:
        assert change.item is not None or change.key not in (version_key, term_key)
        if change.item is not None and change.key == term_key:
            elected = leadership_of(change.item)
            assert elected.term == (leader.term if leader else 0) + 1
            assert elected.fencing_token > (leader.fencing_token if leader else 0)
            leader = elected
        if change.item is not None and change.key == version_key:
            published = published_of(change.item)
            assert leader is not None
            assert (published.fencing_token, published.term) == (leader.fencing_token, leader.term)
            assert not effective or published.version > effective[-1].version
            effective.append(published)
    check_answers(history, effective)
    return len(effective)


def check_answers(history: History, effective: list[Published]) -> None:
    took_effect = [(item.version, item.manifest_sha256, item.fencing_token) for item in effective]
    for call in history.calls:
        if call.kind == "publish" and call.is_answered:
            assert took_effect.count(call.argument) == (call.answer == "ok"), call


async def run_schedules(there: World, seed: int) -> list[History]:
    """All schedules, some at once, under trouble."""
    chance, gate = random.Random(seed), asyncio.Semaphore(NUM_AT_ONCE)
    kinds = [use_register] * NUM_REGISTERS + [fight_for_office] * NUM_ELECTIONS
    chance.shuffle(kinds)

    async def one(index: int, schedule: Callable[..., Awaitable[History]], schedule_seed: float) -> History:
        async with gate:
            return await schedule(there, f"{schedule.__name__}/{index}", random.Random(schedule_seed))

    troubling = asyncio.create_task(trouble(there, chance))
    work = [one(index, schedule, chance.random()) for index, schedule in enumerate(kinds)]
    gathered = asyncio.gather(*work)
    await asyncio.wait({troubling, gathered}, return_when=asyncio.FIRST_COMPLETED)
    if troubling.done():
        troubling.result()
    troubling.cancel()
    await asyncio.gather(troubling, return_exceptions=True)
    return await gathered


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("seed", [1])
async def test_what_callers_saw_could_have_happened(seed: int) -> None:
    async with world() as there:
        histories = await run_schedules(there, seed)
        changes = await everything_that_happened(there.cluster.endpoints)
    num_calls = sum(len(history.calls) for history in histories)
    num_unanswered = sum(not call.is_answered for history in histories for call in history.calls)
    num_published = 0
    for history in histories:
        if history.run.startswith(use_register.__name__):
            assert explain(history.calls, register_model) is not None, history
        else:
            assert explain(history.calls, version_model) is not None, history
            num_published += check_leaders(history, changes)
    print(f"{len(histories)} schedules, {num_calls} calls, {num_unanswered} unanswered, {num_published} publications")
    assert num_unanswered > 0
    assert num_published > 0
