"""Any causal language model of transformers, as the engine needs it: one pass over tokens of many slots.

Models whose attention cannot be replaced, or whose layers are not plain or sliding-window attention (state-space
layers, chunked attention), are refused when they load.
"""

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.errors import InvalidInput, NotFound
from services.inference import adapters
from services.inference.adapters import Adapter
from services.inference.attention import NAME, Part, current
from services.inference.decoder import FastDecoder, has_fast_decoder
from services.inference.kv_cache import SlotCache

log = logging.getLogger(__name__)
CHECK_TOLERANCE = 1e-2
PROBE_TOKENS = 24
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
            folder, dtype=dtype, attn_implementation=NAME, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InvalidInput(f"model folder {folder}: {error}") from error
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SUPPORTED_LAYERS
    if layers or not model._supports_attention_backend:
        why = f"layers of type {sorted(layers)}" if layers else f"the attention of {type(model).__name__}"
        raise InvalidInput(f"model folder {folder}: {why} cannot be run by the built-in engine; use SGLang or vLLM")
    ready: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return ready


@dataclass(frozen=True, slots=True)
class Queries:
    """The tokens of one forward pass, slot after slot; slots that decode come first."""

    slots: NDArray[np.int64]
    """[n]."""
    counts: NDArray[np.int64]
    """[n] how many tokens of each slot."""
    tokens: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T] position of each token in its slot."""
    wanted: NDArray[np.int64]
    """[k] tokens, by their number, whose logits are wanted."""
    adapters: list[Adapter | None] | None = None
    """[n] of each slot; None: none has one."""


class LanguageModel:
    """A model and its cache."""

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        self.model = model
        self.device = model.device
        self._decoder: FastDecoder | None = None
        self._has_hooks = False
        self.cache = SlotCache(num_slots, model.device)
        text_config = model.config.get_text_config()
        self.vocab_size: int = int(text_config.vocab_size)
        self.context_length: int = int(getattr(text_config, "max_position_embeddings", 2048))
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._decoder = self._checked_decoder() if has_fast_decoder(model) else None

    def logits(self, queries: Queries) -> torch.Tensor:
        """Logits [k, vocab] (float32); the cache holds all tokens afterwards. Called in inference mode."""
        positions = self._tensor(queries.positions)
        slots = self._tensor(np.repeat(queries.slots, queries.counts))
        self.cache.place(slots, positions, int(queries.slots.max()) + 1, int(queries.positions.max()) + 1)
        current.parts = tuple(self._parts(queries, positions))
        adapters.current.uses = tuple(self._uses(queries))
        tokens, wanted = self._tensor(queries.tokens), self._tensor(queries.wanted)
        forward = self._forward if self._decoder is None else self._decoder.logits
        return forward(tokens, positions, wanted, self.cache).float()

    def prepare_for_adapters(self) -> None:
        """Before the first adapter is used."""
        if self._decoder is None and not self._has_hooks:
            adapters.hook_linear_layers(self.model)
            self._has_hooks = True

    def _uses(self, queries: Queries) -> list[adapters.Use]:
        """The adapters of a pass, with their tokens."""
        of_slots = queries.adapters or []
        distinct = {id(adapter): adapter for adapter in of_slots if adapter is not None}
        if len(distinct) == 1 and None not in of_slots:
            return [adapters.Use(adapter, None) for adapter in distinct.values()]
        uses = []
        for adapter in distinct.values():
            mine = np.repeat([other is adapter for other in of_slots], queries.counts)
            uses.append(adapters.Use(adapter, self._tensor(np.flatnonzero(mine))))
        return uses

    def weights_changed(self) -> None:
        """Take over the parameters' new values; between two passes."""
        if self._decoder is not None:
            self._decoder.refresh()

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Logits [k, vocab] of the wanted ones of the tokens [T], by the model's own `forward`."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=wanted,
            **{self._cache_argument: cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _checked_decoder(self) -> FastDecoder | None:
        """The fast decoder, if it computes what the model's own `forward` does."""
        expected, self._decoder = self._probe(), FastDecoder(self.model)
        if torch.allclose(self._probe(), expected, rtol=CHECK_TOLERANCE, atol=CHECK_TOLERANCE * float(expected.std())):
            return self._decoder
        log.warning("the fast decoder does not reproduce this %s: using the slower one", self.model.config.model_type)
        return None

    def _probe(self) -> torch.Tensor:
        """Logits of a few tokens."""
        one = np.zeros(1, dtype=np.int64)
        numbers = np.arange(PROBE_TOKENS)
        tokens = numbers * 7919 % self.vocab_size
        return self.logits(Queries(one, one + PROBE_TOKENS, tokens, numbers, numbers))

    def _parts(self, queries: Queries, positions: torch.Tensor) -> list[Part]:
        """The slots before the first one with several tokens, and the others."""
        several = queries.counts > 1
        num_decoding = int(several.argmax()) if several.any() else len(several)
        parts = []
        if num_decoding:
            parts.append(self._part(queries, positions, 0, num_decoding))
        if num_decoding < len(queries.slots):
            parts.append(self._part(queries, positions, num_decoding, len(queries.slots)))
        return parts

    def _part(self, queries: Queries, positions: torch.Tensor, first: int, last: int) -> Part:
        """Slots number `first` to `last` - 1 of the pass."""
        slots, counts = queries.slots[first:last], queries.counts[first:last]
        start, size, width = int(queries.counts[:first].sum()), int(counts.sum()), int(counts.max())
        tokens = slice(start, start + size)
        length = self.cache.read_length(int(queries.positions[tokens].max()) + 1)
        is_range = int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((np.diff(slots) == 1).all())
        where = slice(int(slots[0]), int(slots[0]) + len(slots)) if is_range else self._tensor(slots)
        if size == width * len(slots):
            return Part(tokens, where, positions[tokens].view(len(slots), width), length)
        column = np.arange(width)
        is_token = column < counts[:, None]
        number = np.where(is_token, (np.cumsum(counts) - counts)[:, None] + column, 0)
        pad, unpad = self._tensor(number), self._tensor(np.flatnonzero(is_token))
        padded = positions[tokens][pad] * self._tensor(is_token)
        return Part(tokens, where, padded, length, pad, unpad)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
