"""The engine computes what transformers computes, for every kind of model it accepts, however its tokens are cut up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from headway.errors import HeadwayError, InvalidInput, NotFound
from services.inference.language_model import LanguageModel, Queries, load_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
SHARED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 6}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, shared heads, tied": LlamaConfig(**SMALL, **SHARED, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**SMALL, **SHARED, **WINDOW),
    "qwen2, biases": Qwen2Config(**SMALL, **SHARED),
    "qwen3, head norms": Qwen3Config(**SMALL, **SHARED, head_dim=16),
    "gemma3, window in some layers": Gemma3TextConfig(
        **SMALL, **SHARED, **WINDOW, head_dim=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt-neox, no gate": GPTNeoXConfig(**SMALL),
}


def folder_of(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def feed(model: LanguageModel, chunks: list[dict[int, list[int]]]) -> dict[int, torch.Tensor]:
    """Run passes, each with the next tokens of some slots; returns the last logits of each slot."""
    lengths: dict[int, int] = {}
    last: dict[int, torch.Tensor] = {}
    for chunk in chunks:
        slots = sorted(chunk, key=lambda slot: (len(chunk[slot]) > 1, slot))
        counts = np.array([len(chunk[slot]) for slot in slots])
        positions = np.concatenate([lengths.get(slot, 0) + np.arange(len(chunk[slot])) for slot in slots])
        tokens = np.concatenate([np.array(chunk[slot]) for slot in slots])
        with torch.inference_mode():
            logits = model.logits(Queries(np.array(slots), counts, tokens, positions, np.cumsum(counts) - 1))
        for slot, row in zip(slots, logits, strict=True):
            lengths[slot] = lengths.get(slot, 0) + len(chunk[slot])
            last[slot] = row
    return last


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_of(CONFIGS[name], tmp_path)
    model = LanguageModel(load_model(folder, torch.device("cpu"), torch.float32), num_slots=4)
    rng = np.random.default_rng(0)
    long, short, other = (rng.integers(1, 64, size).tolist() for size in (40, 3, 17))
    last = feed(
        model,
        [
            {0: long[:11], 1: short[:2], 3: other[:5]},
            {0: long[11:30], 1: short[2:], 3: other[5:6]},
            {0: long[30:31], 3: other[6:]},
            {0: long[31:]},
        ],
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for slot, tokens in ((0, long), (1, short), (3, other)):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(last[slot], expected, atol=1e-4, rtol=1e-4)


def test_the_fast_decoder_is_used_only_where_it_reproduces_the_model(tmp_path: Path) -> None:
    model = load_model(folder_of(CONFIGS["llama"], tmp_path), torch.device("cpu"), torch.float32)
    assert LanguageModel(model, 1)._decoder is not None
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    assert LanguageModel(model, 1)._decoder is None


def test_weights_written_in_place_are_the_weights_used(tmp_path: Path) -> None:
    loaded = load_model(folder_of(CONFIGS["llama"], tmp_path), torch.device("cpu"), torch.float32)
    model = LanguageModel(loaded, 1)
    torch.manual_seed(1)
    fresh = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    with torch.no_grad():
        for name, parameter in loaded.state_dict(keep_vars=True).items():
            parameter.copy_(fresh.state_dict()[name])
    model.weights_changed()
    tokens = list(range(1, 20))
    with torch.no_grad():
        expected = fresh(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(feed(model, [{0: tokens}])[0], expected, atol=1e-4, rtol=1e-4)


def test_attention_that_the_engine_does_not_do_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(**SMALL, **SHARED, head_dim=8)
    model = load_model(folder_of(config, tmp_path), torch.device("cpu"), torch.float32)
    with pytest.raises(InvalidInput, match="softcap"):
        feed(LanguageModel(model, 1), [{0: [1, 2]}])


@pytest.mark.parametrize("what", ["nothing", "config", "pickle", "damaged"])
def test_a_folder_without_a_usable_model_is_one_clear_line(what: str, tmp_path: Path) -> None:
    if what != "nothing":
        LlamaConfig(**SMALL).save_pretrained(tmp_path)
    if what == "pickle":
        torch.save({}, tmp_path / "pytorch_model.bin")
    if what == "damaged":
        (tmp_path / "model.safetensors").write_bytes(b"no weights")
    kind: type[HeadwayError] = InvalidInput if what == "damaged" else NotFound
    with pytest.raises(kind, match="model folder"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)
