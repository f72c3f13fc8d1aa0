"""Text of token ids, and the token ids of text, by the tokenizer in the model's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headway.errors import InvalidInput


class Detokenizer:
    """A tokenizer of transformers, without the cost of its wrapper where it has a fast backend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
        self.eos_token_id: int | None = tokenizer.eos_token_id

    @classmethod
    def load(cls, folder: Path) -> "Detokenizer":
        """Read it from a model folder.

        Raises:
            InvalidInput: The folder has no tokenizer that transformers can read.
        """
        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InvalidInput(f"model folder {folder}: no tokenizer that transformers can read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._decode(list(token_ids), skip_special_tokens=skip_special_tokens)) if token_ids else ""
