"""Matrix products in float32, and linear layers in training, by the faster of torch's two libraries.

On a CPU torch multiplies matrices with MKL, which keeps to AVX2 on AMD's processors; oneDNN, which torch carries too,
uses their AVX-512 units and is about twice as fast. Both are float32 throughout: results differ by rounding. Everything
else (other types, other devices, small products, weights that are spread over ranks) is torch's own.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

PACKED_FROM_BYTES = 1 << 19
"""A smaller matrix stays in the cache, and its layout does not matter."""
SMALL_PRODUCT = 1 << 19
"""Below so many multiplications, calling oneDNN takes longer than MKL takes in all."""
onednn: Any = torch.ops.mkldnn
backends: Any = torch.backends


@cache
def is_onednn_faster() -> bool:
    """Whether this CPU is one of those that MKL does not use fully."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        platform.machine() == "x86_64"
        and backends.cpu.get_cpu_capability() == "AVX512"
        and backends.mkldnn.is_available()
        and cpuinfo.is_file()
        and "AuthenticAMD" in cpuinfo.read_text()
    )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, is_packed: bool = True) -> Tensor:
    """a [m, k] times the transpose of b [n, k], plus bias [n]; without gradient.

    Args:
        is_packed: Bring a large `b` into oneDNN's layout first: worth it where it is reused in the product, m >> k.
    """
    if not is_onednn_faster() or a.dtype != torch.float32 or a.device.type != "cpu":
        return linear(a, b, bias)
    if a.shape[0] * b.numel() < SMALL_PRODUCT:
        return linear(a, b, bias)
    a, b = a.contiguous(), b.contiguous()
    if is_packed and b.nbytes >= PACKED_FROM_BYTES:
        b = onednn._reorder_linear_weight(b, None)
    found: Tensor = onednn._linear_pointwise(a, b, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    """A linear layer whose three products are `product`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.has_bias = bias is not None
        return product(values.flatten(0, -2), weight, bias).view(*values.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        d_values = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_values = product(gradient, weight.t()).view_as(values)
        if ctx.needs_input_grad[1]:
            d_weight = product(gradient.t(), values.flatten(0, -2).t(), is_packed=False)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            d_bias = gradient.sum(0)
        return d_values, d_weight, d_bias


class FastLinear(nn.Linear):
    """A linear layer that trains with the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if type(weight) not in (Tensor, nn.Parameter) or input.dtype != torch.float32 or input.ndim < 2:
            return super().forward(input)
        found: Tensor = _Linear.apply(input, weight, self.bias)  # type: ignore[no-untyped-call]
        return found


def use_fast_products(model: nn.Module) -> None:
    """Let the model's linear layers be `FastLinear`, in place, where that is faster; names and values stay."""
    if not is_onednn_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
