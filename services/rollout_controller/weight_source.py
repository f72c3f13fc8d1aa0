"""The trainer as the source of weights: asked for a group and told to send, while the engines receive."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError, NotFound, Unavailable
from headway.runtime.grpc_client import connect, translating
from headway.runtime.wire import version_to_wire
from headway.v1 import weights_pb2 as pb
from headway.v1.weights_pb2_grpc import WeightSourceStub

OPEN_S = 5.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that arrive as one."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that weights are broadcast in, and what will be."""

    name: str
    is_new: bool
    """Engines have to join it first."""
    address: str
    port: int
    world_size: int
    backend: str
    buckets: list[Bucket]


class WeightSource(Protocol):
    """Sends a version's weights into a process group."""

    async def open(self, version: PolicyVersion, world_size: int, last_group: str) -> Group:
        """Raises: NotFound, when nobody holds the version."""
        ...

    async def send(self, version: PolicyVersion, group: Group, timeout_s: float) -> None:
        """Send; returns when all members have everything.

        Raises:
            HeadwayError: They do not.
        """
        ...


class TrainerSource:
    """Whichever of the registered trainers holds the version: the leader.

    Args:
        addresses: The trainers' addresses, "host:port", as they are registered now.
    """

    def __init__(self, addresses: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._holder = ""

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def open(self, version: PolicyVersion, world_size: int, last_group: str) -> Group:
        request = pb.OpenGroupRequest(version=version_to_wire(version), world_size=world_size, group_name=last_group)
        for address in sorted(await self._addresses(), key=lambda address: address != self._holder):
            try:
                with translating(f"ask {address} for {version.label}"):
                    reply = await self._stub(address).OpenGroup(request, timeout=OPEN_S)
            except (NotFound, Unavailable):
                continue
            self._holder = address
            return _group(reply, world_size)
        raise NotFound(f"no trainer holds {version.label}")

    async def send(self, version: PolicyVersion, group: Group, timeout_s: float) -> None:
        request = pb.SendRequest(version=version_to_wire(version), group_name=group.name)
        with translating(f"send {version.label}"):
            await self._stub(self._holder).Send(request, timeout=timeout_s)

    def _stub(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return WeightSourceStub(self._channels[address])


def _group(reply: pb.OpenGroupReply, world_size: int) -> Group:
    buckets = [
        Bucket(list(bucket.names), list(bucket.dtypes), [list(shape.sizes) for shape in bucket.shapes])
        for bucket in reply.buckets
    ]
    if not buckets:
        raise HeadwayError(f"group {reply.group_name} has nothing to send")
    return Group(reply.group_name, reply.is_new, reply.address, reply.port, world_size, reply.backend, buckets)
