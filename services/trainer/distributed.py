"""The processes of one trainer: how they find each other, how the model is spread over them, and how they add up.

torchrun says who there is (WORLD_SIZE, RANK, LOCAL_RANK). Samples are spread over the data-parallel ranks, and FSDP2
spreads parameters, gradients and optimizer state over them too; with tensor parallelism each layer's matrices are cut
over neighbouring ranks, which then work on the same samples.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from headway.config.actor import ModelConfig
from headway.config.allocation import Dims
from headway.errors import InvalidInput

if TYPE_CHECKING:
    from services.trainer.model import Policy

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective that takes longer has lost a rank."""


def start_process_group() -> None:
    """Join the other ranks: NCCL on CUDA (gloo beside it for tensors on the CPU), gloo otherwise. One rank: nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)


def default_device() -> torch.device:
    """The CUDA device of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def group_of_all_ranks(timeout: timedelta) -> "dist.ProcessGroup | None":
    """A group of its own over the CPU; None with one rank. Every rank calls it in the same order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


@dataclass(frozen=True)
class Ranks:
    """Where this process stands."""

    rank: int
    world_size: int
    device: torch.device
    data_rank: int = 0
    data_size: int = 1
    """Ranks over which samples are spread."""
    mesh: DeviceMesh | None = None
    """Axes `data` and `tensor`; None: one rank."""

    @classmethod
    def find(cls, dims: Dims, device: torch.device) -> "Ranks":
        """Ask torch.distributed.

        Raises:
            InvalidInput: The number of processes is not what the allocation says, or it asks for context parallelism.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if dims.context > 1:
            raise InvalidInput(f"context parallelism is not built; nearest that works: d{dims.data * dims.context}")
        if dims.world_size != world_size:
            raise InvalidInput(
                f"allocation_mode asks for a trainer of {dims.world_size} ranks, {world_size} are running: "
                f"start it with torchrun --nproc-per-node, or change the training half"
            )
        if world_size == 1:
            return cls(0, 1, device)
        mesh = init_device_mesh(device.type, (dims.data, dims.tensor), mesh_dim_names=("data", "tensor"))
        return cls(dist.get_rank(), world_size, device, mesh.get_local_rank("data"), dims.data, mesh)

    def reduce(self, x: Tensor, how: str) -> Tensor:
        """The `sum`, `min` or `max` of `x` over the data-parallel ranks; any device. Collective."""
        if self.mesh is None or self.data_size == 1:
            return x
        operation = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[how]
        total = x.to(self.device, copy=True)
        dist.all_reduce(total, operation, group=self.mesh.get_group("data"))
        return total.to(x.device)


def place(policy: "Policy", config: ModelConfig, ranks: Ranks, reduce_dtype: torch.dtype) -> None:
    """Move a model to where it computes, in place: sharded over the ranks, or whole on the one device.

    On CUDA, parameters are kept in float32 and cast to `config.dtype` for each forward and backward pass. On a CPU
    everything is float32, whatever `dtype` says: bfloat16 products are several times slower there.

    Raises:
        InvalidInput: Tensor parallelism does not go with this model.
    """
    if ranks.mesh is None and ranks.device.type == "cpu":
        return
    mesh = ranks.mesh or _mesh_of_one(ranks.device)
    if mesh["tensor"].size() > 1:
        cut_layers(policy.lm, mesh["tensor"])
    options: dict[str, Any] = {"mesh": mesh["data"]}
    if ranks.device.type == "cuda":
        dtype = getattr(torch, config.dtype)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for layer in layers(policy):
        fully_shard(layer, **options)
    fully_shard(policy, **options)


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""transformers' words for how a module is cut. The last is a norm over each head, with the heads spread over ranks."""
WHOLE = ("embedding_rowwise", "colwise_gather_output")
"""Modules that stay whole on every rank: the embedding and the output layer, whose rows the loss reads."""


def cut_layers(lm: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut the matrices of each layer over the ranks of `mesh`, as the model's own plan says.

    Raises:
        InvalidInput: The model has no plan, or one with a cut that is not known here, or its heads do not divide.
    """
    plan: dict[str, str] = getattr(lm, "_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - set(STYLES) - set(WHOLE))
    kind, degree = lm.config.model_type, mesh.size()
    if not plan or unknown:
        raise InvalidInput(
            f"tensor parallelism does not go with {kind} ({', '.join(unknown) or 'no plan'}): use d, not t"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(lm.config, name, degree) % degree:
            raise InvalidInput(f"{name} = {getattr(lm.config, name)} of {kind} cannot be cut into t = {degree} parts")
    styles = {name: STYLES[how]() for name, how in plan.items() if how in STYLES}
    parallelize_module(lm, mesh, styles)


def layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers says are not to be split."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    """FSDP2 is also what does mixed precision on one GPU; it wants a mesh."""
    if not dist.is_initialized():
        store = HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    return init_device_mesh(device.type, (1, 1), mesh_dim_names=("data", "tensor"))
