"""The built-in engine as a whole: model, thread, weights and what it says about itself."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway import __version__
from headway.errors import InvalidInput
from services.inference.adapters import read_adapter
from services.inference.detokenizer import Detokenizer
from services.inference.distributed import WeightsGroup
from services.inference.engine import Engine, EngineSettings
from services.inference.language_model import LanguageModel, load_model
from services.inference.weights import Staged, allowed_folder, checksums, read_weights

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


@dataclass(frozen=True)
class BuiltinSettings:
    """What the built-in engine is started with."""

    folder: Path
    """The model."""
    label: str = "default"
    """Version of its weights."""
    weights_roots: tuple[Path, ...] = ()
    """Folders below which weights may be loaded, beside the model's own."""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    context_length: int | None = None
    seed: int | None = None
    """Of requests that bring no seed; None: from the system's entropy."""
    engine: EngineSettings = field(default_factory=EngineSettings)


class BuiltinEngine:
    """A started engine and the operations on its weights. All methods are for the event loop."""

    def __init__(self, settings: BuiltinSettings) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.rng = np.random.default_rng(settings.seed)
        self.started_at = int(time.time())
        self.model_path = self.served_model_name = str(settings.folder)
        self.weight_version = settings.label
        model = load_model(settings.folder, _device(settings.device), _dtype(settings.dtype))
        language_model = LanguageModel(model, settings.engine.max_running_requests)
        if settings.context_length is not None:
            language_model.context_length = min(settings.context_length, language_model.context_length)
        detokenizer = Detokenizer.load(settings.folder)
        self.engine = Engine(language_model, detokenizer, settings.engine, settings.label)
        self.distributed = WeightsGroup(language_model.model)
        self._prepared: tuple[Path, Staged] | None = None
        """Read ahead, for the update that comes next."""

    async def prepare_from_disk(self, path: str) -> tuple[bool, str]:
        """Read and check a folder while requests run, so that its update need only swap."""
        folder = allowed_folder(path, (self.settings.folder, *self.settings.weights_roots))
        self._prepared = None  # weights of three versions need not be held at once
        self._prepared = folder, await asyncio.to_thread(read_weights, folder, self.engine.model.model)
        return True, "Succeeded to read model weights."

    async def update_from_disk(self, path: str, label: str | None, flush_cache: bool) -> tuple[bool, str]:
        """Read a folder, then swap: between two steps if paused, else when no request runs."""
        folder = allowed_folder(path, (self.settings.folder, *self.settings.weights_roots))
        started = time.monotonic()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == folder:
            staged = prepared[1]
        else:
            staged = await asyncio.to_thread(read_weights, folder, self.engine.model.model)
        success, message = await self.swap(staged, label, flush_cache)
        self.engine.counters.weight_load_s += time.monotonic() - started
        if success:
            self.model_path = self.served_model_name = path
            message += f" Weight version updated to {label}." if label is not None else ""
        return success, message

    async def update_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        flush_cache: bool,
        weight_version: str | None,
        load_format: str | None,
    ) -> tuple[bool, str]:
        """Receive tensors from the trainer, then swap them in."""
        staged = await self.distributed.receive(names, dtypes, shapes, group_name, load_format)
        success, message = await self.swap(staged, weight_version, flush_cache)
        return success, "Succeeded to update parameter online." if success else message

    async def swap(self, staged: Staged, label: str | None, flush_cache: bool) -> tuple[bool, str]:
        """Copy staged weights into the model; (False, why) if they are in, but a wanted flush was not possible."""
        is_flushed = await self.engine.call(partial(self._swap, staged, label, flush_cache), when_idle=True)
        if flush_cache and not is_flushed:
            return False, NOT_FLUSHED
        self.weight_version = label or self.weight_version
        return True, "Succeeded to update model weights."

    def _swap(self, staged: Staged, label: str | None, flush_cache: bool) -> bool:
        staged.apply()
        self.engine.weights_changed()
        if label is not None:
            self.engine.set_label(label)
        return flush_cache and self.engine.flush_cache()

    async def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter beside what runs; requests may name it when this returns.

        Raises:
            InvalidInput, NotFound, Refused: There is one of that name, or this one cannot be used.
        """
        folder = allowed_folder(path, (self.settings.folder, *self.settings.weights_roots))
        if name in self.engine.adapters:
            raise InvalidInput(f"Failed to load LoRA adapter: {name} is already loaded")
        adapter = await asyncio.to_thread(read_adapter, name, folder, self.engine.model.model)
        await self.engine.call(partial(self.engine.add_adapter, adapter))

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away from new requests; those that run keep it to their end.

        Raises:
            InvalidInput: There is none of that name.
        """
        if name not in self.engine.adapters:
            raise InvalidInput(f"Failed to unload LoRA adapter: {name} is not loaded")
        await self.engine.call(partial(self.engine.remove_adapter, name))

    @property
    def adapters(self) -> dict[str, str]:
        """Folder by name of each adapter that requests may name."""
        return {name: adapter.path for name, adapter in self.engine.adapters.items()}

    async def set_version(self, label: str) -> None:
        await self.engine.call(partial(self.engine.set_label, label))
        self.weight_version = label

    async def abort_all(self) -> None:
        await self.engine.call(partial(self.engine.abort, lambda request: True))

    async def checksums(self) -> tuple[dict[str, str], str]:
        """By parameter, and over all of them."""
        sums = await self.engine.call(partial(checksums, self.engine.model.model))
        total = hashlib.sha256("".join(f"{name}={value};" for name, value in sorted(sums.items())).encode())
        return sums, total.hexdigest()[:16]

    def model_info(self) -> dict[str, Any]:
        """SGLang's /model_info."""
        config = self.engine.model.model.config
        return {
            "model_path": self.model_path,
            "served_model_name": self.served_model_name,
            "tokenizer_path": str(self.settings.folder),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    def server_info(self) -> dict[str, Any]:
        """SGLang's /server_info, with this engine's own settings."""
        scheduler = self.engine.scheduler
        return {
            "model_path": self.model_path,
            "device": self.settings.device,
            "dtype": self.settings.dtype,
            "context_length": self.engine.model.context_length,
            "random_seed": self.settings.seed,
            **asdict(self.settings.engine),
            "internal_states": [
                {"num_running_reqs": scheduler.num_running, "num_queue_reqs": len(scheduler.waiting)},
            ],
            "version": __version__,
            "frontend": "headway-builtin",
        }


@asynccontextmanager
async def start_builtin(settings: BuiltinSettings) -> AsyncIterator[BuiltinEngine]:
    """Load the model and run the engine's thread for as long as the block runs.

    Raises:
        NotFound: The model folder is incomplete.
        InvalidInput: The model cannot be run here.
    """
    builtin = await asyncio.to_thread(BuiltinEngine, settings)
    builtin.engine.start()
    try:
        yield builtin
    finally:
        await builtin.engine.stop()


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("inference.device: cuda, but torch sees no CUDA device here; use cpu")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"inference.dtype: {name} is not a torch dtype such as float32 or bfloat16")
    return dtype
