"""Send published weights straight into the engines: a process group with the engines, a broadcast, no disk in between.

    write(version) -> hold(version, tensors)          the rollout controller:  OpenGroup -> engines join -> Send
                                                                               (the engines receive meanwhile)

Rank 0 of the trainer is rank 0 of the group and owns its store. A group is kept while its size does not change; a new
one has a store, a port and a name of its own. Nothing here delays training: joining and sending run in threads
beside it, on a copy of the weights.

Guarantee: only a version that this process holds whole is sent, and only under its own name.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc
import torch
import torch.distributed
import torch.distributed.distributed_c10d

from headway.config import ExperimentConfig
from headway.core.version import PolicyVersion
from headway.errors import NotFound, TimedOut
from headway.runtime.wire import version_from_wire
from headway.v1 import weights_pb2 as pb
from headway.v1.weights_pb2_grpc import WeightSourceServicer

dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d
SOURCE = "headway.v1.WeightSource"
BUCKET_BYTES = 256 * 1024**2
"""Tensors travel together up to this size; a larger one travels alone."""
JOIN_TIMEOUT = timedelta(seconds=60)
log = logging.getLogger(__name__)


@dataclass
class SendingGroup:
    """A process group of this process and the engines."""

    name: str
    world_size: int
    port: int
    joined: "asyncio.Future[Any]"
    """The group, once all members have joined."""


class WeightSender:
    """Holds the newest published weights, and sends them when asked.

    Args:
        address: Where engines reach this process.
        device: Of the broadcast tensors: CUDA sends by NCCL, the CPU by gloo.
    """

    def __init__(self, address: str, device: torch.device) -> None:
        self._address = address
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._version: PolicyVersion | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._group: SendingGroup | None = None
        self._num_groups = 0
        self._sending = asyncio.Lock()

    def hold(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep a version's tensors, which nobody changes any more, until the next one. Any thread may call."""
        self._version, self._tensors = version, tensors

    async def open(self, version: PolicyVersion, world_size: int, name: str) -> pb.OpenGroupReply:
        """Find or make the group for a transfer.

        Raises:
            NotFound: Another version is held.
        """
        tensors = self._held(version)
        is_new = self._group is None or (self._group.name, self._group.world_size) != (name, world_size)
        if is_new:
            self._open_group(world_size)
        group = self._group
        assert group is not None
        return pb.OpenGroupReply(
            group_name=group.name,
            is_new=is_new,
            address=self._address,
            port=group.port,
            backend=self._backend,
            buckets=[_described(bucket, tensors) for bucket in buckets(tensors)],
        )

    async def send(self, version: PolicyVersion, name: str) -> tuple[int, float]:
        """Broadcast a version; returns its bytes and the seconds that it took.

        Raises:
            NotFound: Another version is held, or there is no such group.
            TimedOut: The engines did not join, or a broadcast did not end; the group is given up.
        """
        tensors, group = self._held(version), self._group
        if group is None or group.name != name:
            raise NotFound(f"there is no group {name}")
        try:
            joined = await asyncio.shield(group.joined)
            async with self._sending:
                return await asyncio.to_thread(self._broadcast, joined, tensors)
        except RuntimeError as error:
            self._group = None
            raise TimedOut(f"group {name} is given up: {error}") from error

    def _held(self, version: PolicyVersion) -> Mapping[str, torch.Tensor]:
        held, tensors = self._version, self._tensors
        if held != version:
            raise NotFound(f"{version.label} is not held here, but {held.label if held else 'no version'}")
        return tensors

    def _open_group(self, world_size: int) -> None:
        """Listen, and wait in a thread for the engines to join."""
        listener = socket.create_server(("", 0), backlog=world_size)
        port = listener.getsockname()[1]
        self._num_groups += 1
        name = f"weights-{port}-{self._num_groups}"
        joining = asyncio.ensure_future(asyncio.to_thread(_join, listener, port, world_size, name, self._backend))
        joining.add_done_callback(_note_failure)
        self._group = SendingGroup(name, world_size, port, joining)

    def _broadcast(self, group: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[int, float]:
        began, num_bytes = time.monotonic(), 0
        for bucket in buckets(tensors):
            flat = torch.cat([tensors[name].flatten().view(torch.uint8) for name in bucket]).to(self._device)
            group.broadcast(flat, 0).wait()
            num_bytes += flat.numel()
        return num_bytes, time.monotonic() - began


def sender_for(config: ExperimentConfig, address: str) -> WeightSender | None:
    """What `actor.weight_update_mode: xccl` needs; None for `disk`."""
    if config.actor.weight_update_mode != "xccl":
        return None
    is_cuda = config.inference.device == "cuda" if config.engine == "builtin" else torch.cuda.is_available()
    return WeightSender(address, torch.device("cuda" if is_cuda else "cpu"))


class WeightSourceApi(WeightSourceServicer):
    """Answers the rollout controller."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    async def OpenGroup(self, request: pb.OpenGroupRequest, context: grpc.aio.ServicerContext) -> pb.OpenGroupReply:  # type: ignore[type-arg]
        return await self._sender.open(version_from_wire(request.version), request.world_size, request.group_name)

    async def Send(self, request: pb.SendRequest, context: grpc.aio.ServicerContext) -> pb.SendReply:  # type: ignore[type-arg]
        num_bytes, elapsed_s = await self._sender.send(version_from_wire(request.version), request.group_name)
        log.info("%d bytes were broadcast in %.3f s", num_bytes, elapsed_s)
        return pb.SendReply(bytes=num_bytes, elapsed_s=elapsed_s)


def buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of tensors that travel together, in order."""
    bucket: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _described(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> pb.Bucket:
    return pb.Bucket(
        names=names,
        dtypes=[str(tensors[name].dtype).removeprefix("torch.") for name in names],
        shapes=[pb.Shape(sizes=tensors[name].shape) for name in names],
    )


def _join(listener: socket.socket, port: int, world_size: int, name: str, backend: str) -> Any:
    """Own the store, and join as rank 0; returns when all members have."""
    store = dist.TCPStore("localhost", port, world_size, True, JOIN_TIMEOUT, master_listen_fd=listener.detach())
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], c10d.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=JOIN_TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def _note_failure(joining: "asyncio.Future[Any]") -> None:
    if not joining.cancelled() and joining.exception() is not None:
        log.warning("the engines did not join the weights group: %s", joining.exception())
