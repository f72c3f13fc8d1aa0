"""Servers that go to a version together wait for each other, but for nobody who will not come."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headway.core.version import PolicyVersion
from headway.errors import NotFound
from services.rollout_controller import broadcast as module
from services.rollout_controller.broadcast import Broadcast, Circle
from services.rollout_controller.engine_api import UpdateFailed
from services.rollout_controller.weight_source import Bucket, Group

V1 = PolicyVersion(1, 1)


class Receiver:
    """A dialect that notes what it is told, and fails when it should."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[str] = []
        self._fails = fails

    async def join_group(self, group: Group, rank: int) -> None:
        self.told.append(f"join {group.name} as {rank}")

    async def leave_group(self, name: str) -> None:
        self.told.append(f"leave {name}")

    async def receive(self, group: Group, version: PolicyVersion) -> None:
        self.told.append(f"receive {version.label} in {group.name}")
        if self._fails:
            raise UpdateFailed("a shape does not fit")


class Server:
    """What a broadcast needs of an engine server."""

    def __init__(self, key: str, dialect: Any = None) -> None:
        self.key = self.name = key
        self.dialect = dialect or Receiver()


class Source:
    """A trainer: keeps a group while its size is the same."""

    def __init__(self, holds: bool = True) -> None:
        self.holds = holds
        self.sizes: list[int] = []

    async def open(self, version: PolicyVersion, world_size: int, last_group: str) -> Group:
        if not self.holds:
            raise NotFound("not held")
        is_new = not last_group or self.sizes[-1] != world_size
        self.sizes.append(world_size)
        name = f"group{len(self.sizes)}" if is_new else last_group
        bucket = Bucket(["w"], ["float32"], [[1]])
        return Group(name, is_new, "127.0.0.1", 1, world_size, "gloo", [bucket])

    async def send(self, version: PolicyVersion, group: Group, timeout_s: float) -> None:
        """Done at once."""


def broadcast_to(servers: Sequence[Any], circle: Circle, tasks: list["asyncio.Task[None]"]) -> Broadcast:
    def run(broadcast: Broadcast) -> None:
        tasks.append(asyncio.create_task(broadcast.transfer()))

    return Broadcast(V1, servers, circle, 5.0, run)


async def arrive(broadcast: Broadcast, *servers: Any) -> list[Any]:
    arrivals = (broadcast.arrive(server) for server in servers)
    async with asyncio.timeout(5):
        return await asyncio.gather(*arrivals, return_exceptions=True)


async def test_all_receive_in_one_group_in_the_order_of_their_names() -> None:
    a, b = Server("a"), Server("b")
    outcome = await arrive(broadcast_to([a, b], Circle(Source()), []), b, a)
    assert outcome == [True, True]
    assert a.dialect.told == ["join group1 as 1", "receive v1.1 in group1"]
    assert b.dialect.told == ["join group1 as 2", "receive v1.1 in group1"]


async def test_the_same_servers_keep_their_group_and_others_get_a_new_one() -> None:
    circle, a, b = Circle(Source()), Server("a"), Server("b")
    await arrive(broadcast_to([a], circle, []), a)
    await arrive(broadcast_to([a], circle, []), a)
    await arrive(broadcast_to([a, b], circle, []), a, b)
    told = ["join group1 as 1", "receive v1.1 in group1", "receive v1.1 in group1"]
    assert a.dialect.told == [*told, "leave group1", "join group3 as 1", "receive v1.1 in group3"]


async def test_a_server_that_will_not_come_is_not_waited_for() -> None:
    a, b = Server("a"), Server("b")
    broadcast = broadcast_to([a, b], Circle(Source()), [])
    arriving = asyncio.create_task(arrive(broadcast, a))
    await asyncio.sleep(0)
    broadcast.drop(b)  # type: ignore[arg-type]
    assert await arriving == [True]
    assert not broadcast.awaits(b)  # type: ignore[arg-type]


async def test_a_server_that_is_late_loads_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARRIVE_S", 0.01)
    a, late = Server("a"), Server("late")
    broadcast = broadcast_to([a, late], Circle(Source()), [])
    assert await arrive(broadcast, a) == [True]
    assert not broadcast.awaits(late)  # type: ignore[arg-type]


async def test_without_a_holder_of_the_version_nothing_is_touched() -> None:
    a = Server("a")
    assert await arrive(broadcast_to([a], Circle(Source(holds=False)), []), a) == [False]
    assert a.dialect.told == []


async def test_one_that_fails_is_told_so_and_the_group_is_given_up() -> None:
    circle, good, bad = Circle(Source()), Server("good"), Server("bad", Receiver(fails=True))
    outcome = await arrive(broadcast_to([good, bad], circle, []), good, bad)
    assert outcome[0] is True
    assert isinstance(outcome[1], UpdateFailed)
    assert good.dialect.told[-1] == bad.dialect.told[-1] == "leave group1"


async def test_servers_of_another_dialect_are_never_awaited() -> None:
    assert not broadcast_to([Server("v", object())], Circle(Source()), []).awaits(Server("v"))  # type: ignore[arg-type]
