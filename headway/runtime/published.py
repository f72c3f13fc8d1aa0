"""What a published version's folder holds: a whole model, or an adapter (LoRA) and the name of the base it changes.

    weights/v1.3/              whole: shards, config.json, tokenizer, manifest.json
    weights/base-1f0c9a.../    the base model of adapters, whole; written once, named by its content
    weights/v1.3/              adapter: adapter_model.safetensors, adapter_config.json, manifest.json with its `base`

An engine that serves adapters reports the base's name as its version, and has each adapter loaded under a name that
carries the version: `default_lora-v1.3`. Such a name is given to one content only.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import orjson

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, NotFound

MANIFEST = "manifest.json"
BASE_PREFIX = "base-"
DIGITS = 16
"""Of the sha256 of a base's manifest, in its name."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version's folder."""

    path: Path
    base: Path | None
    """Folder of the model that the adapter changes; None: the version is whole."""

    @property
    def model(self) -> Path:
        """The folder with a model and its tokenizer."""
        return self.base or self.path


def read_published(folder: Path) -> Published:
    """Look at a version's folder.

    Raises:
        NotFound: It, or its base, has no manifest.
        InvalidInput: The manifest cannot be read, or the base is not the one that it names.
    """
    base = _manifest(folder).get("base")
    if base is None:
        return Published(folder, None)
    path = folder.parent / str(base)
    _manifest(path)
    if base_name(hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()) != base:
        raise InvalidInput(f"{path} is not the base that {folder} was trained on: its manifest differs")
    return Published(folder, path)


def base_name(manifest_sha256: str) -> str:
    """Name of a base's folder, and of its weights in engines."""
    return f"{BASE_PREFIX}{manifest_sha256[:DIGITS]}"


def adapter_name(lora_name: str, version: PolicyVersion) -> str:
    """Under which an engine knows a version's adapter.

    Example:
        >>> adapter_name("default_lora", PolicyVersion(1, 3))
        'default_lora-v1.3'
    """
    return f"{lora_name}-{version.label}"


def adapter_version(lora_name: str, name: str) -> PolicyVersion | None:
    """The version that an adapter's name carries; None: it is none of ours.

    Example:
        >>> adapter_version("default_lora", "default_lora-v1.3")
        PolicyVersion(term=1, step=3)
        >>> adapter_version("default_lora", "another-v1.3") is None
        True
    """
    prefix, _, label = name.rpartition("-")
    if prefix != lora_name:
        return None
    try:
        return PolicyVersion.parse(label)
    except ValueError:
        return None


def _manifest(folder: Path) -> dict[str, object]:
    path = folder / MANIFEST
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{path} is not there") from None
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not a manifest: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} is not a manifest")
    return content
