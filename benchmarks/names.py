"""How fast name-resolve is, against etcd itself from the same client process.

    python benchmarks/names.py [--seconds 3] [--json FILE]

etcd, the service and the client are a process each, on loopback; etcd syncs every write to disk. Calls per second of
one caller, and of 64 at once in the process; then the time from the publication of a version until each of 100 watchers
has it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.core.version import PolicyVersion
from headway.runtime.grpc_client import connect
from headway.runtime.names import NameClient
from headway.runtime.names_session import Session
from headway.runtime.service import READY_PREFIX
from headway.testing.etcd import running_etcd
from headway.v1 import name_resolve_pb2 as pb
from headway.v1.name_resolve_pb2_grpc import NameResolveStub
from services.name_resolve.etcd import Login, Member

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
NUM_CLIENTS = (1, 64)
NUM_WATCHERS = 100
NUM_PUBLICATIONS = 200
PAUSE_S = 0.02
RUN = "bench/names"
VALUE = "10.0.0.1:40000"
GOAL_RATE, GOAL_LATENCY = 0.5, 2.0

Call = Callable[[int], Awaitable[object]]


@dataclass
class Row:
    """One line of the table."""

    what: str
    service: float
    etcd: float
    unit: str
    goal: str

    @property
    def ratio(self) -> float:
        return self.service / self.etcd


async def rate(call: Call, num_clients: int, seconds: float) -> float:
    """Calls per second of some clients, each one call at a time."""
    end = time.perf_counter() + seconds
    counts = [0] * num_clients

    async def client(index: int) -> None:
        while time.perf_counter() < end:
            await call(index)
            counts[index] += 1

    start = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(num_clients)))
    return sum(counts) / (time.perf_counter() - start)


def calls_of(names: Session, member: Member) -> dict[str, tuple[Call, Call]]:
    """Each operation through the service, and what does the same in etcd."""

    def name(index: int) -> str:
        return f"{RUN}/services/reward/{index}"

    async def resolve(index: int) -> object:
        return await names.Resolve(pb.ResolveRequest(name=name(index)), timeout=10.0)

    async def etcd_resolve(index: int) -> object:
        return await member.kv.get(f"/bench/{name(index)}", timeout=10)

    async def register(index: int) -> object:
        return await names.Register(pb.RegisterRequest(name=name(index), value=VALUE, replace=True), timeout=10)

    async def etcd_register(index: int) -> object:
        return await member.kv.put(f"/bench/{name(index)}", VALUE, timeout=10)

    async def register_kept(index: int) -> object:
        request = pb.RegisterRequest(name=name(index), value=VALUE, replace=True, ttl_s=60.0)
        return await names.Register(request, timeout=10)

    async def etcd_register_kept(index: int) -> object:
        lease = await member.lease.grant(60, timeout=10)
        return await member.kv.put(f"/bench/{name(index)}", VALUE, lease=lease.ID, timeout=10)

    return {
        "Register, with a lease": (register_kept, etcd_register_kept),
        "Register, without": (register, etcd_register),
        "Resolve": (resolve, etcd_resolve),
    }


async def measure_rates(names: Session, member: Member, seconds: float) -> list[Row]:
    rows = []
    for what, (ours, theirs) in calls_of(names, member).items():
        for num_clients in NUM_CLIENTS:
            best = [0.0, 0.0]
            for _ in range(3):  # taken in turns, the best of each: other processes share the machine
                for index, call in enumerate((ours, theirs)):
                    best[index] = max(best[index], await rate(call, num_clients, seconds / 3))
            rows.append(Row(f"{what}, {num_clients} clients", best[0], best[1], "/s", f">= {GOAL_RATE}"))
    return rows


class Watchers:
    """Notes when each watcher has seen each publication."""

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}
        self.num_ready = 0
        self._changed = asyncio.Event()

    def note(self, step: int) -> None:
        self.seen.setdefault(step, []).append(time.perf_counter())
        self._changed.set()

    def ready(self) -> None:
        self.num_ready += 1
        self._changed.set()

    def all_have(self, step: int) -> bool:
        return len(self.seen.get(step, [])) == NUM_WATCHERS

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


async def latencies(watch: Callable[[Watchers], Coroutine[Any, Any, None]], publish: Call) -> list[float]:
    """Seconds from the beginning of each publication until each watcher has it, sorted."""
    watchers = Watchers()
    tasks = [asyncio.create_task(watch(watchers)) for _ in range(NUM_WATCHERS)]
    await watchers.until(lambda: watchers.num_ready == NUM_WATCHERS)
    found: list[float] = []
    for step in range(1, NUM_PUBLICATIONS + 1):
        begin = time.perf_counter()
        await publish(step)
        await watchers.until(partial(watchers.all_have, step))
        found += [moment - begin for moment in watchers.seen[step]]
        await asyncio.sleep(PAUSE_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return sorted(found)


async def measure_watches(names: NameClient, member: Member) -> list[Row]:
    async def watch(watchers: Watchers) -> None:
        async with aclosing(names.watch_versions()) as versions:
            async for record in versions:
                if record.version.step == 0:
                    watchers.ready()
                else:
                    watchers.note(record.version.step)

    async def publish(step: int) -> None:
        await names.publish_version(PolicyVersion(1, step), "a" * 64, 1)

    async def etcd_watch(watchers: Watchers) -> None:
        from etcd3aio.watch import WatchService

        async for response in WatchService(member.channel).watch("/bench/version"):
            if response.created:
                watchers.ready()
            for event in response.events:
                watchers.note(int(event.kv.value))

    async def etcd_publish(step: int) -> None:
        await member.kv.put("/bench/version", str(step))

    await publish(0)
    ours = await latencies(watch, publish)
    theirs = await latencies(etcd_watch, etcd_publish)
    return [
        Row(
            f"publish, seen by {NUM_WATCHERS} watchers, p{percent}",
            *at(percent, ours, theirs),
            "ms",
            f"<= {GOAL_LATENCY}",
        )
        for percent in (50, 99)
    ]


def at(percent: int, ours: list[float], theirs: list[float]) -> tuple[float, float]:
    index = percent * len(ours) // 100
    return ours[index] * 1000, theirs[index] * 1000


async def measure(seconds: float) -> list[Row]:
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(running_etcd())
        address = await start_service(stack, cluster.endpoints)
        member = Member(cluster.endpoints, Login())
        stack.push_async_callback(member.channel.close)
        channel = connect(address)
        stack.push_async_callback(channel.close)
        session = Session(NameResolveStub(channel))
        stack.push_async_callback(session.close)
        rows = await measure_rates(session, member, seconds)
        names = await stack.enter_async_context(NameClient(address, RUN))
        return rows + await measure_watches(names, member)


async def start_service(stack: AsyncExitStack, endpoints: str) -> str:
    """Start name-resolve as a process; its address."""
    words = ["-m", "services.name_resolve", "--config", str(CONFIG)]
    overrides = ["cluster.name_resolve.type=etcd3", f"cluster.name_resolve.etcd3_addr={endpoints}"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, *overrides, stdout=asyncio.subprocess.PIPE)
    stack.push_async_callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    ready = json.loads((await process.stdout.readline()).decode().removeprefix(READY_PREFIX))
    return f"127.0.0.1:{ready['ports']['grpc']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each rate, seconds")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.seconds))
    print(f"{'':<46}{'service':>10}{'etcd':>10}{'ratio':>8}  goal")
    for row in rows:
        print(f"{row.what:<46}{row.service:>10.1f}{row.etcd:>10.1f}{row.ratio:>8.2f}  {row.goal}  ({row.unit})")
    if arguments.json:
        arguments.json.write_text(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=2))


if __name__ == "__main__":
    main()
