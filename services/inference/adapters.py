"""Low-rank adapters (LoRA) beside a model: read from peft's files, and added to what its linear layers compute.

    layer(x) + (x A^T) (scaling B)^T      for the tokens whose request names the adapter

The model's own weights are never touched, so requests of several adapters, and of none, share a forward pass. Layers
with the same input are one product here too.
"""

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.errors import InvalidInput, NotFound
from services.inference.weights import read_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in peft's files."""
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class Adapter:
    """An adapter that is loaded."""

    name: str
    path: str
    pairs: dict[nn.Module, Pair]
    """([inputs, rank], [rank, outputs]) of each layer that it changes."""
    _joined: dict[tuple[nn.Module, ...], Pair | None] = field(default_factory=dict)

    def joined(self, layers: tuple[nn.Module, ...]) -> Pair | None:
        """The pair of some layers with one input, side by side; None: it changes none of them."""
        if layers not in self._joined:
            self._joined[layers] = self._join(layers)
        return self._joined[layers]

    def _join(self, layers: Sequence[Any]) -> Pair | None:
        found = [(layer, *self.pairs[layer]) for layer in layers if layer in self.pairs]
        if not found:
            return None
        sizes = [(self.pairs[layer][0].shape[1] if layer in self.pairs else 0) for layer in layers]
        outputs = [layer.weight.shape[0] for layer in layers]
        up = found[0][2].new_zeros(sum(sizes), sum(outputs))
        row = column = 0
        for layer, rank, width in zip(layers, sizes, outputs, strict=True):
            if layer in self.pairs:
                up[row : row + rank, column : column + width] = self.pairs[layer][1]
            row, column = row + rank, column + width
        return torch.cat([down for _, down, _ in found], dim=1), up


@dataclass(frozen=True)
class Use:
    """An adapter, and the tokens of a forward pass that use it."""

    adapter: Adapter
    tokens: torch.Tensor | None
    """Their numbers; None: all."""


class Pass(threading.local):
    """What adapters the forward pass of this thread uses."""

    uses: tuple[Use, ...] = ()


current = Pass()


def add_adapters(layers: tuple[nn.Module, ...], values: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Add to `product` [T, outputs] what the adapters in use make of `values` [T, inputs]; in place."""
    for use in current.uses:
        pair = use.adapter.joined(layers)
        if pair is None:
            continue
        down, up = pair
        if use.tokens is None:
            product.addmm_(values @ down, up)
        else:
            product.index_add_(0, use.tokens, (values[use.tokens] @ down) @ up)
    return product


def hook_linear_layers(model: PreTrainedModel) -> None:
    """Have the model's own `forward` add the adapters in use."""

    def hook(layer: nn.Module, arguments: tuple[torch.Tensor, ...], product: torch.Tensor) -> torch.Tensor:
        if current.uses:
            add_adapters((layer,), arguments[0].flatten(0, -2), product.flatten(0, -2))
        return product

    for layer in _linear_layers(model).values():
        layer.register_forward_hook(hook)


def read_adapter(name: str, folder: Path, model: PreTrainedModel) -> Adapter:
    """Read an adapter's folder.

    Raises:
        NotFound: It holds no adapter.
        InvalidInput: It is damaged, does not fit the model, or is of a kind that is not done here.
    """
    scaling = _scaling(folder)
    tensors = read_tensors(folder, TENSORS)
    layers = _linear_layers(model)
    pairs = {}
    for place in sorted({key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}):
        if place not in layers:
            raise InvalidInput(f"{folder}: the adapter changes {place}, which is no linear layer of this model")
        pairs[layers[place]] = _pair(f"{PREFIX}{place}", tensors, layers[place], scaling)
    return Adapter(name, str(folder), pairs)


def _pair(place: str, tensors: dict[str, torch.Tensor], layer: nn.Module, scaling: float) -> Pair:
    weight: Any = layer.weight
    try:
        down, up = tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"]
    except KeyError as error:
        raise InvalidInput(f"the adapter has no {error}") from None
    if (up.shape[0], down.shape[1]) != tuple(weight.shape) or down.shape[0] != up.shape[1]:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise InvalidInput(f"the adapter's {place} has the shapes {shapes}, the layer {list(weight.shape)}")
    down, up = (tensor.to(weight.device, weight.dtype) for tensor in (down, up * scaling))
    return down.T.contiguous(), up.T.contiguous()


def _scaling(folder: Path) -> float:
    """lora_alpha / rank, as the adapter's configuration says."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError:
        raise NotFound(f"{folder} has no {CONFIG}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder / CONFIG} cannot be read: {error!r}") from error
    unusual = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(key)]
    if unusual or config.get("bias", "none") != "none":
        raise InvalidInput(f"{folder}: adapters with {', '.join(unusual) or 'biases'} are not served; use SGLang")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name; without the output layer, which sees other tokens than the rest."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
