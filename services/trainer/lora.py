"""Low-rank adapters (LoRA, arXiv:2106.09685): only they are trained, and they can be published alone.

peft puts the adapters into the model's layers. What is published is the adapter in peft's format, which engines load
beside the base model; an export of the model has it merged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headway.config.actor import ActorConfig

NAME = "default"
"""Of the one adapter, inside peft."""
FILE_PREFIX = "base_model.model."
"""Before every name in an adapter file."""


def lora_config(config: ActorConfig) -> LoraConfig:
    """The adapter that the experiment asks for."""
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
    )


def add_adapters(lm: PreTrainedModel, config: ActorConfig) -> None:
    """Put adapters into the layers, in place, and freeze everything else. They begin as no change at all."""
    inject_adapter_in_model(lora_config(config), lm, adapter_name=NAME)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(_is_adapter(name))


def adapter_config(lm: PreTrainedModel, config: ActorConfig) -> dict[str, Any]:
    """Content of `adapter_config.json`; the adapted modules are listed by name, as engines want them."""
    names = {name.rpartition(".")[2] for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    settings: Any = lora_config(config)
    values = settings.to_dict() | {"target_modules": sorted(names), "inference_mode": True}
    return {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Within, the model is the base model."""
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_parameters(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The whole weights under the base model's names, adapters added in. Collective where sharded."""
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in lm.named_parameters():
        if _is_adapter(name):
            continue
        weight, place = whole(parameter), name.removesuffix(".base_layer.weight")
        if place in layers:
            weight = weight + _change(layers[place]).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def base_parameters(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The whole weights that adapters change, without them. Collective where sharded."""
    for name, parameter in lm.named_parameters():
        if not _is_adapter(name):
            yield name.replace(".base_layer.", "."), whole(parameter)


def adapter_parameters(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The adapter's whole tensors under the names that peft's files have. Collective where sharded."""
    for name, parameter in lm.named_parameters():
        if _is_adapter(name):
            yield FILE_PREFIX + name.replace(f".{NAME}.", "."), whole(parameter)


def whole(parameter: Tensor) -> Tensor:
    """The tensor with all its shards, without gradient. Collective where sharded."""
    found = parameter.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _change(layer: Any) -> Tensor:
    """What a layer's adapter adds to its weight, [out, in]."""
    a, b = whole(layer.lora_A[NAME].weight), whole(layer.lora_B[NAME].weight)
    change: Tensor = torch.mm(b, a) * layer.scaling[NAME]
    return change


def _is_adapter(name: str) -> bool:
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name
