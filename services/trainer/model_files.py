"""What a version carries beside its tensors: configuration and tokenizer, as transformers reads them."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config import ExperimentConfig

if TYPE_CHECKING:
    from services.trainer.engine import TrainEngine

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def static_files(config: ExperimentConfig, engine: "TrainEngine") -> dict[str, bytes]:
    """Content by file name."""
    with tempfile.TemporaryDirectory(prefix="headway-") as name:
        folder = Path(name)
        engine.hf_config.save_pretrained(folder)
        if engine.generation_config is not None:
            engine.generation_config.save_pretrained(folder)
        _add_tokenizer(config.tokenizer_path, folder)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _add_tokenizer(path: str, folder: Path) -> None:
    """Copy a local tokenizer byte for byte; let transformers write one that comes from the hub."""
    source = Path(path).expanduser()
    if not source.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(path).save_pretrained(folder)
        return
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())
