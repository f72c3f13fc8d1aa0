"""Make a small random Llama with a tokenizer, to try an engine without downloading one.

    python -m services.inference.tiny_model FOLDER [SEED]

1.5 million parameters, vocabulary 512 (bytes and a few words), context 1024, two key-value heads for four query heads.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = "hello world the quick brown fox jumps over the lazy dog 0123456789 add sub mul"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Any:
    """A byte-level tokenizer; `<|im_end|>` (2) ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS] * 50, trainer)
    kind: Any = PreTrainedTokenizerFast
    fast = kind(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.chat_template = CHAT
    return fast


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights, large enough for distributions that are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write a model folder; the same seed gives the same bytes."""
    make_model(seed).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    save_tiny_model(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
