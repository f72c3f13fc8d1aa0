"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3), without the cost of its modules.

transformers' modules cost a small model more time than its arithmetic. This is the same computation over the same
parameters in about sixteen calls a layer: projections that share their input are one product, the rotation is applied
to queries and keys at once, the last norm and the head see only the tokens whose logits are wanted.

Guarantee: it is used only for a model that it reproduces; `LanguageModel` compares both on some tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, rms_norm, silu
from transformers import PreTrainedModel

from services.inference.attention import attend
from services.inference.kv_cache import SlotCache
from services.inference.linear import FastLinear

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Layer:
    """One layer's parameters."""

    input_norm: torch.Tensor
    qkv: FastLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: FastLinear
    mlp_norm: torch.Tensor
    gate_up: FastLinear
    down: FastLinear
    window: int | None


class FastDecoder:
    """Computes logits of a model's tokens, as its own `forward` does."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.model
        config = model.config
        self._embedding: torch.Tensor = body.embed_tokens.weight
        self._rotary: Any = body.rotary_emb
        self._layers = [_read_layer(layer) for layer in body.layers]
        self._norm: torch.Tensor = body.norm.weight
        self._head = FastLinear([model.lm_head])
        attention = body.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._scaling: float = attention.scaling
        self._epsilon: float = config.rms_norm_eps

    def refresh(self) -> None:
        """Take over the parameters' present values."""
        self._head.refresh()
        for layer in self._layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.refresh()

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Logits [k, vocab] of the wanted ones [k] of the tokens [T], which `cache` and `attend` know how to place."""
        values = embedding(tokens, self._embedding)
        cosine, sine = self._rotary(values[None], positions[None])
        rotation = cosine[0, :, None], _signed(sine[0, :, None])
        for number, layer in enumerate(self._layers):
            values = values + self._attention(layer, number, self._normed(values, layer.input_norm), rotation, cache)
            gate, up = layer.gate_up(self._normed(values, layer.mlp_norm)).chunk(2, dim=-1)
            values = values + layer.down(silu(gate).mul_(up))
        if len(wanted) != len(tokens):
            values = values[wanted]
        return self._head(self._normed(values, self._norm))

    def _attention(
        self,
        layer: Layer,
        number: int,
        values: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
    ) -> torch.Tensor:
        num_tokens, num_turned = len(values), self._num_heads + self._num_kv_heads
        heads = layer.qkv(values).view(num_tokens, num_turned + self._num_kv_heads, self._head_dim)
        turned = heads[:, :num_turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = turned.split([self._num_heads, self._num_kv_heads], dim=1)  # type: ignore[no-untyped-call]
            turned = torch.cat([self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)], dim=1)
        cosine, sine = rotation
        turned = torch.addcmul(turned * cosine, turned.roll(self._head_dim // 2, -1), sine)
        keys, cached = cache.write(number, turned[:, self._num_heads :], heads[:, num_turned:])
        mixed = attend(turned[:, : self._num_heads], keys, cached, self._scaling, layer.window)
        return layer.output(mixed.reshape(num_tokens, -1))

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(values, weight.shape, weight, self._epsilon)


def _signed(sine: torch.Tensor) -> torch.Tensor:
    """Sines, negative in the first half: with them, rolling by half the size is as good as rotating the half."""
    half = sine.shape[-1] // 2
    return torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)


def _read_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=FastLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=FastLinear([attention.o_proj]),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=FastLinear([mlp.gate_proj, mlp.up_proj]),
        down=FastLinear([mlp.down_proj]),
        window=getattr(attention, "sliding_window", None),
    )


def has_fast_decoder(model: PreTrainedModel) -> bool:
    """Whether the model looks like one of the family."""
    config = model.config
    return config.model_type in FAMILY and config.hidden_act == "silu" and hasattr(model, "lm_head")
