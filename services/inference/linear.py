"""Linear layers for inference: several that share their input as one product, by the faster of torch's two libraries.

In float32 torch multiplies matrices with MKL, which keeps to AVX2 on AMD's CPUs; oneDNN, which torch carries too, uses
their AVX-512 units and is two to three times faster. Weights that do not fit the cache are kept in oneDNN's own layout
beside the parameter, which takes their memory once more, and must be refreshed when the parameter changes.
"""

from collections.abc import Sequence

import torch
from torch import nn

from headway.algorithm.products import PACKED_FROM_BYTES, SMALL_PRODUCT, is_onednn_faster, onednn
from services.inference.adapters import add_adapters


class FastLinear:
    """What some linear layers with the same input compute, side by side.

    The layers' parameters become parts of one tensor, so that writing to them in place changes it, too.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = tuple(layers)
        self._weight = _joined(layers, "weight")
        self._bias = _joined(layers, "bias") if layers[0].bias is not None else None
        is_float32_on_cpu = self._weight.dtype == torch.float32 and self._weight.device.type == "cpu"
        self._uses_onednn = is_float32_on_cpu and is_onednn_faster()
        self._packed = self._weight
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the parameters' present values."""
        if self._uses_onednn and self._weight.nbytes >= PACKED_FROM_BYTES:
            self._packed = onednn._reorder_linear_weight(self._weight, None)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[T, inputs] -> [T, outputs of all the layers], with what adapters add."""
        return add_adapters(self._layers, values, self._product(values))

    def _product(self, values: torch.Tensor) -> torch.Tensor:
        if not self._uses_onednn or values.shape[0] * self._weight.numel() < SMALL_PRODUCT:
            return nn.functional.linear(values, self._weight, self._bias)
        product: torch.Tensor = onednn._linear_pointwise(values, self._packed, self._bias, "none", [], "")
        return product


@torch.no_grad()
def _joined(layers: Sequence[nn.Linear], name: str) -> torch.Tensor:
    """The layers' parameters of that name as one tensor, of which they are parts from now on."""
    parameters = [getattr(layer, name) for layer in layers]
    if len(parameters) == 1:
        return torch.Tensor(parameters[0].detach())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):  # type: ignore[no-untyped-call]
        parameter.data = part
    return whole
