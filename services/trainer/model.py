"""The causal language model in training: from a folder, or from scratch; what its forward pass returns is log-probs.

`Policy` wraps a transformers model so that one call goes from token ids to the log-probabilities of the scored tokens,
without ever holding the logits of all of them, and so that FSDP2 gathers the output layer for exactly that call.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from headway.algorithm.logprobs import TokenLogprobs, token_logprobs
from headway.algorithm.products import use_fast_products
from headway.config.actor import ActorConfig, ModelConfig
from headway.errors import InvalidInput
from services.trainer.attention import ATTENTION
from services.trainer.layout import MicroBatch
from services.trainer.lora import add_adapters

PACKED_IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Values of `attn_impl` that mean the same mathematics as the packed attention here, which is what they get."""


class Policy(nn.Module):
    """A model that scores tokens.

    Args:
        lm: A transformers causal language model.
        temperature: Logits are divided by it.
    """

    def __init__(self, lm: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature

    @property
    def is_packed(self) -> bool:
        """Whether it takes packed micro-batches; otherwise padded ones."""
        return bool(self.lm.config._attn_implementation == ATTENTION)

    def forward(self, micro_batch: MicroBatch) -> TokenLogprobs:
        """Log-probability and entropy of the scored tokens, [m]."""
        options = {} if micro_batch.attention is None else {"packed": micro_batch.attention}
        found = self.lm.base_model(
            input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False, **options
        )
        hidden: Tensor = found.last_hidden_state.flatten(0, 1).index_select(0, micro_batch.predictors)
        head = self.lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return token_logprobs(hidden, head.weight, head.bias, micro_batch.targets, self.temperature)


def load_policy(config: ModelConfig, *, temperature: float, seed: int) -> Policy:
    """The model of an `actor` or `ref` section, in float32 on the CPU; random weights follow the seed.

    Raises:
        InvalidInput: The folder holds no causal language model, or one whose logits are not a plain linear layer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = _from_scratch(config) if config.init_from_scratch else _from_folder(config)
        if isinstance(config, ActorConfig) and config.use_lora:
            add_adapters(lm, config)
    _check_output_layer(lm.config)
    if config.disable_dropout:
        disable_dropout(lm)
    if config.gradient_checkpointing:
        _checkpoint_activations(lm)
    use_fast_products(lm)
    lm.train()
    return Policy(lm, temperature)


def disable_dropout(lm: nn.Module) -> None:
    """Set every dropout probability to 0, also those that attention layers hold as numbers."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def has_dropout(lm: nn.Module) -> bool:
    """Whether a forward pass in training mode is random."""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0) or bool(getattr(module, "attention_dropout", 0))
        for module in lm.modules()
    )


def _checkpoint_activations(lm: Any) -> None:
    """Recompute each layer in the backward pass; transformers renamed the switch in version 5."""
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _attention_name(config: ModelConfig) -> str:
    return ATTENTION if config.attn_impl in PACKED_IMPLEMENTATIONS else config.attn_impl


def _from_scratch(config: ModelConfig) -> PreTrainedModel:
    try:
        hf_config = AutoConfig.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"no model configuration in {config.path!r}: {_first_line(error)}") from error
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(
        hf_config, dtype=torch.float32, attn_implementation=_attention_name(config)
    )
    return model


def _from_folder(config: ModelConfig) -> PreTrainedModel:
    if Path(config.path).is_dir() and not any(Path(config.path).glob("*.safetensors")):
        raise InvalidInput(f"{config.path} holds no *.safetensors; for random weights set init_from_scratch: true")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=torch.float32, attn_implementation=_attention_name(config), use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot load a model from {config.path!r}: {_first_line(error)}") from error
    return model


def _check_output_layer(hf_config: PretrainedConfig) -> None:
    for name in ("final_logit_softcapping", "logit_scale"):
        if getattr(hf_config, name, None) not in (None, 1.0):
            raise InvalidInput(f"{hf_config.model_type} changes its logits by {name}: training it is not supported")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
