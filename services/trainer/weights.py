"""Write policy versions to disk, so that a folder with a version's name is complete or absent.

    .v1.3.writing/  -- rename -->  v1.3/  -- PublishVersion(sha256 of manifest.json)
      shards, static files, then manifest.json, each fsynced

Where an adapter (LoRA) is trained, a version holds only that, and names the base that it changes: a folder of its own,
written once and named by its content, which stays for as long as a version needs it.

Decides: names and sizes of shards, what the manifest says, which old versions may go.
Guarantee: a folder named by a version label holds every byte that its manifest names, on disk, before anybody can see
it; it is never changed afterwards, and is removed by one rename. Hashing runs beside writing, so that a version costs
the slower of the two. Proved in test_weights_store.py.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.core.version import LABEL, PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.published import BASE_PREFIX, MANIFEST, base_name
from services.trainer.files import WrittenFile, link_or_copy, sync_folder, write_file

ADAPTER_STEM, ADAPTER_CONFIG = "adapter_model", "adapter_config.json"
"""Of the files that peft writes."""
SHARD_BYTES = 4 * 1024**3
"""Tensors fill a shard up to this size; a larger tensor has a shard of its own."""
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version that is on disk and may be published."""

    version: PolicyVersion
    path: Path
    manifest_sha256: str
    bytes: int


class WeightStore:
    """The folder below which every version has its own folder.

    Args:
        root: The weights root that servers know too.
        static_files: Content by name of what every version carries beside its tensors: config.json, tokenizer files.
    """

    def __init__(self, root: Path, static_files: Mapping[str, bytes]) -> None:
        self.root = root
        self._static = dict(static_files)
        self._shelf = root / f".static-{os.getpid()}"
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._shelf, ignore_errors=True)
        self._shelf.mkdir()
        self._shelved = [write_file(self._shelf / name, [memoryview(data)]) for name, data in static_files.items()]
        self._base: str | None = None

    def close(self) -> None:
        """Remove what only this process needed; versions stay."""
        shutil.rmtree(self._shelf, ignore_errors=True)

    def write(
        self, version: PolicyVersion, parent: PolicyVersion | None, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> WrittenVersion:
        """Write a version aside, then give it its name.

        Args:
            version: Greater than any version written before.
            parent: The version that it was trained from.
            tensors: Name and CPU tensor, in the order of the files; taken one shard at a time.

        Raises:
            InvalidInput: The version exists already: one version names one content for ever.
        """
        path, head = self._new(version, parent)
        sha256, size = write_folder(path, head, tensors, self._place_static)
        return WrittenVersion(version, path, sha256, size)

    def write_base(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write the model that the adapters of this process change; one with the same bytes is kept as it is."""
        aside = self.root / f".{BASE_PREFIX}{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        sha256, _ = write_folder(aside, {}, tensors, self._place_static)
        path = self.root / base_name(sha256)
        if path.exists():
            self._remove(aside)
        else:
            aside.rename(path)
            sync_folder(self.root)
        self._base = path.name
        return path

    def write_adapter(
        self,
        version: PolicyVersion,
        parent: PolicyVersion | None,
        tensors: Iterable[tuple[str, torch.Tensor]],
        config: Mapping[str, object],
    ) -> WrittenVersion:
        """Write a version that is an adapter of the base that `write_base` wrote; as `write` otherwise.

        Args:
            config: Content of `adapter_config.json`.
        """
        path, head = self._new(version, parent)
        data = json.dumps(config, indent=1).encode()

        def place_config(folder: Path) -> list[WrittenFile]:
            return [write_file(folder / ADAPTER_CONFIG, [memoryview(data)])]

        sha256, size = write_folder(path, {**head, "base": self._base}, tensors, place_config, ADAPTER_STEM)
        return WrittenVersion(version, path, sha256, size)

    def _new(self, version: PolicyVersion, parent: PolicyVersion | None) -> tuple[Path, dict[str, object]]:
        """The folder of a version that is to be written, and the first entries of its manifest."""
        path = self.root / version.label
        if path.exists():
            raise InvalidInput(f"{path} exists already: another trainer writes to the same fileroot and trial")
        number = {"term": version.term, "step": version.step}
        return path, {"version": number, "parent": parent.label if parent else None}

    def export(
        self,
        version: PolicyVersion,
        root: Path,
        keep_last: int | None,
        merged: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> Path:
        """Put a version below another root too; the newest `keep_last` stay there.

        Args:
            merged: The whole model, where the version itself is an adapter. None: the files are linked where possible.
        """
        root.mkdir(parents=True, exist_ok=True)
        path, aside = root / version.label, root / f".{version.label}.exporting-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        if merged is not None:
            write_folder(aside, {}, merged, self._place_static)
        else:
            shutil.copytree(self.root / version.label, aside, copy_function=link_or_copy)
            sync_folder(aside)
        if path.exists():
            self._remove(path)
        aside.rename(path)
        sync_folder(root)
        for old in _versions_below(root)[: -keep_last if keep_last else 0]:
            self._remove(root / old.label)
        return path

    def versions(self) -> list[PolicyVersion]:
        """Versions on disk, oldest first."""
        return _versions_below(self.root)

    def remove_leftovers(self, term: int) -> None:
        """Remove what can only be left over when `term` begins: half-written folders, and versions no older than it."""
        for path in self.root.iterdir():
            is_future = LABEL.fullmatch(path.name) is not None and PolicyVersion.parse(path.name).term >= term
            is_half = path.name.startswith((".v", ".static-", f".{BASE_PREFIX}", f"..{BASE_PREFIX}"))
            if (is_future or is_half) and path != self._shelf:
                self._remove(path)

    def remove_except(self, needed: Iterable[PolicyVersion], keep_newest: int) -> list[PolicyVersion]:
        """Remove the versions that are neither needed by a server nor among the newest."""
        versions = self.versions()
        kept = {*needed, *versions[-keep_newest:]}
        removed = [version for version in versions if version not in kept]
        for version in removed:
            self._remove(self.root / version.label)
        if self._base is not None and removed:
            self._remove_bases()
        return removed

    def _remove_bases(self) -> None:
        """Remove the bases that no version on disk names any more."""
        named = {read_manifest(self.root / version.label)[0].get("base") for version in self.versions()}
        for path in self.root.glob(f"{BASE_PREFIX}*"):
            if path.name not in {*named, self._base}:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f".v-gone-{path.name}-{os.getpid()}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _place_static(self, folder: Path) -> list[WrittenFile]:
        for file in self._shelved:
            try:
                os.link(self._shelf / file.name, folder / file.name)
            except OSError:  # no links here, or a later leader has tidied up
                write_file(folder / file.name, [memoryview(self._static[file.name])])
        return self._shelved


def write_folder(
    path: Path,
    head: Mapping[str, object],
    tensors: Iterable[tuple[str, torch.Tensor]],
    place_static: Callable[[Path], Sequence[WrittenFile]],
    stem: str = "model",
) -> tuple[str, int]:
    """Write a model's folder aside, then give it its name.

    Args:
        path: Of the folder; it does not exist.
        head: First entries of the manifest.
        tensors: Name and CPU tensor, in the order of the files; taken one shard at a time.
        place_static: Puts the other files into the folder that it is given.
        stem: Of the names of the files with tensors.

    Returns:
        sha256 of the manifest (hex), and the bytes of all files that it names.
    """
    aside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    files, dtype = _write_shards(aside, tensors, stem)
    files += place_static(aside)
    described = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in files]
    manifest = json.dumps({**head, "dtype": dtype, "files": described}, indent=1)
    written = write_file(aside / MANIFEST, [memoryview(manifest.encode())])
    sync_folder(aside)
    aside.rename(path)
    sync_folder(path.parent)
    return written.sha256, sum(file.bytes for file in files)


def read_manifest(folder: Path) -> tuple[dict[str, object], str]:
    """The manifest of a version's folder, and its sha256 (hex)."""
    data = (folder / MANIFEST).read_bytes()
    content: dict[str, object] = json.loads(data)
    return content, hashlib.sha256(data).hexdigest()


def _versions_below(root: Path) -> list[PolicyVersion]:
    return sorted(PolicyVersion.parse(path.name) for path in root.iterdir() if LABEL.fullmatch(path.name))


def safetensors_buffers(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, without copying tensors that are contiguous on the CPU.

    Wider dtypes come first, so that every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield flat.numpy().data.cast("B")


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], stem: str
) -> tuple[list[WrittenFile], str]:
    shards: list[tuple[WrittenFile, list[str]]] = []
    dtypes: set[torch.dtype] = set()
    for index, shard in enumerate(_shards(tensors)):
        dtypes |= {tensor.dtype for _, tensor in shard}
        file = write_file(folder / f"shard-{index}", safetensors_buffers(shard))
        shards.append((file, [name for name, _ in shard]))
    files = _name_shards(folder, shards, stem)
    return files, "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    shard: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += tensor_bytes
    if shard:
        yield shard


def _name_shards(folder: Path, shards: Sequence[tuple[WrittenFile, list[str]]], stem: str) -> list[WrittenFile]:
    """Give shards the names that transformers looks for; several get an index file."""
    if len(shards) == 1:
        return [_renamed(folder, shards[0][0], f"{stem}.safetensors")]
    files = []
    weight_map = {}
    for index, (file, names) in enumerate(shards, start=1):
        renamed = _renamed(folder, file, f"{stem}-{index:05d}-of-{len(shards):05d}.safetensors")
        weight_map.update(dict.fromkeys(names, renamed.name))
        files.append(renamed)
    content = {"metadata": {"total_size": sum(file.bytes for file in files)}, "weight_map": weight_map}
    index_file = write_file(folder / f"{stem}.safetensors.index.json", [memoryview(json.dumps(content).encode())])
    return [*files, index_file]


def _renamed(folder: Path, file: WrittenFile, name: str) -> WrittenFile:
    (folder / file.name).rename(folder / name)
    return WrittenFile(name, file.bytes, file.sha256)
