"""Replace a model's weights in place, all or nothing, and prove which ones are there.

Reading comes first (`read_weights`, may run beside generation): the manifest's sizes and sha256 where the folder has
one, names and shapes against the model. Only then are bytes copied (`Staged.apply`, between two steps).

Guarantee: after an error the old weights are untouched. Only safetensors are read, never a pickle.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.errors import InvalidInput, NotFound, Refused

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Staged:
    """Weights that fit the model and wait to be copied into it."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    """(the model's parameter, its new value)."""

    @torch.no_grad()
    def apply(self) -> None:
        for parameter, value in self.pairs:
            parameter.copy_(value)


def allowed_folder(path: str, roots: Iterable[Path]) -> Path:
    """The folder that a request names, if it may be read.

    Raises:
        Refused: It lies outside of the weights root and is not the model's own folder.
        NotFound: There is no such folder.
    """
    folder = Path(path).resolve()
    if not any(folder == root or root in folder.parents for root in (root.resolve() for root in roots)):
        raise Refused(f"model_path {path} is not below the folder of published weights")
    if not folder.is_dir():
        raise NotFound(f"Failed to get weights iterator: there is no folder {path}")
    return folder


def read_weights(folder: Path, model: PreTrainedModel) -> Staged:
    """Read and check a folder's weights.

    Raises:
        NotFound: It has no safetensors.
        InvalidInput: A file is not what the manifest says or is damaged, or a name or shape does not fit the model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotFound(f"Failed to get weights iterator: no *.safetensors in {folder}")
    expected = _manifest_hashes(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_read_file(file, expected.get(file.name) if expected else None))
    if expected and (missing := set(expected) - {file.name for file in folder.iterdir()}):
        raise InvalidInput(f"{folder}: the manifest names {sorted(missing)}, which are not there")
    return stage(tensors, model) if _names_fit(tensors, model) else _converted(folder, model)


def read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one file of a folder, checked against the manifest where there is one.

    Raises:
        NotFound: There is no such file.
        InvalidInput: It is not the file of the manifest, or damaged.
    """
    if not (folder / name).is_file():
        raise NotFound(f"{folder} has no {name}")
    expected = _manifest_hashes(folder)
    if expected and name not in expected:
        raise InvalidInput(f"{folder}: the manifest does not name {name}")
    return _read_file(folder / name, expected.get(name))


def stage(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> Staged:
    """Pair tensors, under the model's own names, with its parameters.

    Raises:
        InvalidInput: A name is unknown or a shape differs.
    """
    state = model.state_dict(keep_vars=True)
    pairs = []
    for name, value in tensors.items():
        parameter = state.get(name)
        if parameter is None:
            raise InvalidInput(f"the model has no parameter {name}")
        if parameter.shape != value.shape:
            raise InvalidInput(f"parameter {name} has shape {list(parameter.shape)}, the new one {list(value.shape)}")
        pairs.append((parameter, value))
    return Staged(pairs)


def checksums(model: PreTrainedModel) -> dict[str, str]:
    """First 16 hex digits of the sha256 of each parameter's bytes, by name."""
    return {name: _hash(tensor)[:16] for name, tensor in model.state_dict().items()}


def _hash(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content.data).hexdigest()


def _names_fit(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> bool:
    """Whether the files use the model's own names and leave out only what is tied to something named."""
    state = model.state_dict(keep_vars=True)
    if not set(tensors) <= set(state):
        return False
    covered = {state[name].data_ptr() for name in tensors}
    return all(parameter.data_ptr() in covered for parameter in state.values())


def _converted(folder: Path, model: PreTrainedModel) -> Staged:
    """Let transformers translate the names of the files, in a second copy of the model."""
    auto: Any = AutoModelForCausalLM
    try:
        fresh, report = auto.from_pretrained(
            folder, dtype=model.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidInput(f"{folder}: {error}") from error
    wrong = {key: sorted(map(str, names)) for key, names in report.items() if key != "error_msgs" and names}
    if wrong:
        raise InvalidInput(f"{folder} does not fit the model: {wrong}")
    return stage(fresh.state_dict(), model)


def _manifest_hashes(folder: Path) -> dict[str, str]:
    """sha256 by file name; empty where the folder has no manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        return {entry["name"]: entry["sha256"] for entry in orjson.loads(path.read_bytes())["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path} is not a manifest: {error}") from error


def _read_file(file: Path, sha256: str | None) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped into memory: published files never change, and are copied into the model only."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest() if sha256 is not None else None
    if found != sha256:
        raise InvalidInput(f"{file} is not the file of its manifest: its sha256 differs")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise InvalidInput(f"{file} is damaged: {error}") from error
