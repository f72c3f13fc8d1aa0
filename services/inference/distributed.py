"""Weights that the trainer broadcasts to the engines: process groups beside the default one.

The trainer is rank 0 and owns the store at master_address:master_port; this engine is rank `rank_offset`. Tensors come
in the order of `names`, or as one tensor of bytes that holds them one after the other ("flattened_bucket").
Receiving waits in a thread of its own, so that generation goes on until the weights are here.
"""

import asyncio
import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from headway.errors import InvalidInput, TimedOut
from services.inference.weights import Staged, stage

dist: Any = torch_dist
c10d: Any = distributed_c10d
JOIN_TIMEOUT_S = 300.0
NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


class WeightsGroup:
    """The process groups that this engine has joined, and the open update session."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._groups: dict[str, Any] = {}
        self._is_open = False

    async def join(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> tuple[bool, str]:
        """Join a group; returns when all ranks have.

        Raises:
            InvalidInput: The group is joined already, or the backend is not available here.
            TimedOut: The other ranks did not come.
        """
        if group_name in self._groups:
            raise InvalidInput(f"the weights update group {group_name} exists already; destroy it first")
        group = await asyncio.to_thread(
            _connect, master_address, master_port, rank_offset, world_size, group_name, backend
        )
        self._groups[group_name] = group
        return True, "Succeeded to initialize custom process group."

    async def leave(self, group_name: str) -> tuple[bool, str]:
        """Leave a group.

        Raises:
            InvalidInput: It was never joined.
        """
        if self._groups.pop(group_name, None) is None:
            raise InvalidInput("The group to be destroyed does not exist.")
        return True, "Succeeded to destroy custom process group."

    async def begin(self) -> tuple[bool, str]:
        """Open an update session."""
        if self._is_open:
            raise InvalidInput("a weight-update session is already open; call end_weight_update() first")
        self._is_open = True
        return True, "Success"

    async def end(self) -> tuple[bool, str]:
        """Close the update session."""
        if not self._is_open:
            raise InvalidInput("no weight-update session is open; call begin_weight_update() first")
        self._is_open = False
        return True, "Success"

    async def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, load_format: str | None
    ) -> Staged:
        """Receive tensors that rank 0 broadcasts.

        Raises:
            InvalidInput: No session is open, the group is unknown, or a tensor does not fit the model.
        """
        if not self._is_open:
            raise InvalidInput(NO_SESSION)
        group = self._groups.get(group_name)
        if group is None:
            raise InvalidInput(
                f"Failed to receive weights: Group {group_name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        empty = [torch.empty(shape, dtype=_dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        receive = _receive_bucket if load_format == "flattened_bucket" else _receive_each
        tensors = await asyncio.to_thread(receive, group, [tensor.to(self._model.device) for tensor in empty])
        return stage(dict(zip(names, tensors, strict=True)), self._model)


def _connect(address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> Any:
    """Join as the field's trainers do (SGLang, vLLM, OpenRLHF): a named group beside the default one."""
    if backend not in ("gloo", "nccl") or (backend == "nccl" and not c10d.is_nccl_available()):
        raise InvalidInput(f"backend {backend} is not available here; use gloo on CPU")
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store = dist.TCPStore(address, port, world_size, False, timeout)
        prefixed = dist.PrefixStore(name, store)
        group, _ = c10d._new_process_group_helper(
            world_size, rank, [], c10d.Backend(backend), prefixed, group_name=name, timeout=timeout
        )
        c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    except RuntimeError as error:
        raise TimedOut(f"no weights update group {name} at {address}:{port}: {error}") from error
    return group


def _receive_each(group: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        group.broadcast(tensor, 0).wait()
    return tensors


def _receive_bucket(group: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of bytes, cut into the others."""
    sizes = [tensor.element_size() * math.prod(tensor.shape) for tensor in tensors]
    bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    group.broadcast(bucket, 0).wait()
    parts: Any = torch.split(bucket, sizes)
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"{name} is not a torch dtype")
    return dtype
