"""The text that each token of a sample adds, from a tokenizer on this machine. Nothing is fetched from anywhere."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"


class Pieces:
    """Cuts texts up by tokens; without a tokenizer it knows none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """A text a token; together they are the text of all. '' where a character goes on in the next token."""
        if self._path is None:
            return None
        from tokenizers.decoders import DecodeStream

        tokenizer = _load(self._path)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in token_ids]


@lru_cache(maxsize=1)
def _load(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def find_tokenizer(name: str, weights: Path) -> Path | None:
    """The file of a run's tokenizer: in its folder, in the hub's cache, or beside the newest weights."""
    return next((path for path in _candidates(name, weights) if path.is_file()), None)


def _candidates(name: str, weights: Path) -> Iterator[Path]:
    if name:
        yield Path(name).expanduser() / FILE
        yield from _cached(name)
    yield from sorted(weights.glob(f"v*/{FILE}"), reverse=True)


def _cached(name: str) -> Iterator[Path]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # the name of a folder that is gone
        if isinstance(cached := try_to_load_from_cache(name, FILE), str):
            yield Path(cached)
