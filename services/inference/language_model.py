"""Any causal language model of transformers, as the engine needs it: logits of many slots in one call.

The attention mask is built here, from each query's position: 0 for what it may see, -inf for the rest. Models whose
layers are not plain or sliding-window attention (state-space layers, chunked attention) are refused when they load.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.errors import InvalidInput, NotFound
from services.inference.kv_cache import SlotCache

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Read a model folder; safetensors only.

    Raises:
        NotFound: The folder is not there, or holds no weights.
        InvalidInput: transformers cannot read it, or the engine cannot run it.
    """
    if not (folder / "config.json").is_file():
        raise NotFound(f"model folder {folder}: no config.json there; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise NotFound(f"model folder {folder}: no *.safetensors there; save the model with save_pretrained")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidInput(f"model folder {folder}: {error}") from error
    unsupported = _layer_types(model) - SUPPORTED_LAYERS
    if unsupported:
        raise InvalidInput(f"model folder {folder}: layers of type {sorted(unsupported)} need SGLang or vLLM")
    ready: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return ready


def _layer_types(model: PreTrainedModel) -> set[str]:
    """Kinds of attention; a model with a window that does not name them has it in all layers."""
    config = model.config.get_text_config()
    default = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return set(getattr(config, "layer_types", None) or [default])


@dataclass(frozen=True, slots=True)
class Queries:
    """The query tokens of one forward pass over n slots, padded on the left to q."""

    slots: NDArray[np.int64]
    """[n]."""
    tokens: NDArray[np.int64]
    """[n, q]."""
    positions: NDArray[np.int64]
    """[n, q] position of each in its slot; 0 for padding."""
    is_padding: NDArray[np.bool_] | None
    """[n, q], or None where there is none."""


class LanguageModel:
    """A model and its cache."""

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        self.model = model
        self.device = model.device
        self.cache = SlotCache(num_slots, model.device)
        text_config = model.config.get_text_config()
        self.vocab_size: int = int(text_config.vocab_size)
        self.context_length: int = int(getattr(text_config, "max_position_embeddings", 2048))
        self._window: int | None = getattr(text_config, "sliding_window", None)
        self._layer_types = _layer_types(model)
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def logits(self, queries: Queries) -> torch.Tensor:
        """Logits [n, vocab] (float32) of each slot's last query token; the cache holds all of them afterwards."""
        positions = torch.from_numpy(queries.positions).to(self.device)
        padding = None if queries.is_padding is None else torch.from_numpy(queries.is_padding).to(self.device)
        length = self.cache.place(queries.slots, positions, padding)
        output = self.model(
            input_ids=torch.from_numpy(queries.tokens).to(self.device),
            position_ids=positions,
            attention_mask=self._mask(positions, length),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self.cache},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float() if logits.dtype != torch.float32 else logits.clone()

    def _mask(self, positions: torch.Tensor, length: int) -> Any:
        """[n, 1, q, length], or one of these for each kind of layer where a model has several."""
        distance = positions[:, None, :, None] - torch.arange(length, device=self.device)
        zero = torch.zeros((), dtype=self.model.dtype, device=self.device)
        full = zero.masked_fill(distance < 0, -torch.inf)
        if self._window is None or self._layer_types == {"full_attention"}:
            return full
        sliding = full.masked_fill(distance >= self._window, -torch.inf)
        return (
            {"full_attention": full, "sliding_attention": sliding} if "full_attention" in self._layer_types else sliding
        )
