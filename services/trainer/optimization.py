"""The optimizer, its learning rate over the steps, and the norm of the gradient."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.config.actor import OptimizerConfig

T = TypeVar("T", bound=Tensor)


class Optimization:
    """An optimizer and its schedule.

    Args:
        config: AReaL's keys.
        parameters: Those that are trained.
        total_steps: Over which the schedule runs; one step is one `ppo_update`, whatever its mini-batches.
    """

    def __init__(self, config: OptimizerConfig, parameters: Iterable[nn.Parameter], total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.parameters = list(parameters)
        self.optimizer = build_optimizer(config, self.parameters)
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Use the learning rate of train step `step`, from 0."""
        self.step = step
        self.lr = self.config.lr * lr_factor(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def update(self) -> tuple[float, bool]:
        """Clip the gradients and move the parameters; the norm before clipping, and whether anything was moved.

        A norm that is not finite moves nothing: parameters and moments stay as they are. Gradients are gone afterwards.
        """
        norm = float(gradient_norm(self.parameters))
        is_finite = math.isfinite(norm)
        if is_finite:
            scale_gradients(self.parameters, norm, self.config.gradient_clipping)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, is_finite

    def named_state(self, names: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
        """The optimizer's tensors by parameter name; those of a parameter that never moved are made, as zeros."""
        trained = {id(parameter) for parameter in self.parameters}
        return {name: self._state(parameter) for name, parameter in names.items() if id(parameter) in trained}

    def move_to(self, device: torch.device) -> None:
        """Move the optimizer's tensors; a step counter that lives on the CPU stays there."""
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and (name != "step" or self.config.type == "adam"):
                    state[name] = value.to(device)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if not state and self.config.type != "sgd":
            dtype = torch.bfloat16 if self.config.type == "adam_bf16" else parameter.dtype
            device = "cpu" if self.config.type == "adam_bf16" else parameter.device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return state


def build_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW (decoupled weight decay on every parameter, as AReaL), or SGD."""
    lr, decay, betas, eps = config.lr, config.weight_decay, (config.beta1, config.beta2), config.eps
    if config.type == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=decay)
    if config.type == "adam_bf16":
        return BFloat16AdamW(parameters, lr, betas, eps, decay)
    groups = [{"params": same} for same in _by_layout(parameters).values()]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=True)


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Part of `lr` that train step `step` (from 0) uses.

    Rises over the first `warmup_steps_proportion` of the steps; AReaL starts at 0, so that its first step moves
    nothing; here step s of w warm-up steps gets (s + 1) / w. Then constant, or falling to `min_lr_ratio` at the end.
    """
    warmup = int(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 - progress)
    if config.lr_scheduler_type == "cosine":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm over all parameters and all shards, float32. Collective where sharded.

    Squares are added up over all ranks at once, what several ranks hold divided by their number: every rank gets the
    same bits, so weights that are whole on several ranks never drift apart.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = [torch.zeros(())]
    for same in _by_layout(gradients).values():
        norm = torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in same])
        squares.append(norm.float().square().cpu() / _num_copies(same[0]))
    total = torch.stack(squares).sum()
    sharded = next((g for g in gradients if isinstance(g, DTensor)), None)
    if sharded is not None:
        total = total.to(sharded.device)
        dist.all_reduce(total)
    return total.sqrt()


def _num_copies(tensor: Tensor) -> float:
    """Ranks that hold the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    num_shards = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        num_shards *= size if placement.is_shard() else 1
    return dist.get_world_size() / num_shards


def _by_layout(tensors: Iterable[T]) -> dict[object, list[T]]:
    """Tensors that are spread over ranks in the same way, together: one operation takes them at once."""
    found: dict[object, list[T]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        found.setdefault(layout, []).append(tensor)
    return found


def scale_gradients(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Shrink all gradients so that their norm is at most `largest`."""
    if norm <= largest:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(largest / (norm + 1e-6))


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW whose moments are bfloat16: a third of the memory of float32 moments and master weights together.

    The arithmetic of a step is float32; moments are rounded when they are stored.
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad.float(), group)

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        count, lr = float(state["step"]), group["lr"]
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        move = mean.div_((square / (1 - beta2**count)).sqrt_().add_(group["eps"]))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(move.to(parameter.dtype), alpha=-lr / (1 - beta1**count))
