"""The built-in engine beside its agent, in one process. Imported only where that engine is wanted: it needs torch."""

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from headway.config import ExperimentConfig
from headway.errors import Unavailable
from headway.runtime.http_server import serve_http
from headway.runtime.service import Placement
from services.inference.builtin import BuiltinEngine, BuiltinSettings, start_builtin
from services.inference.engine import EngineSettings
from services.inference.http_api import create_app


class BuiltinAdapter:
    """The built-in engine, which lives in this process."""

    kind = "builtin"

    def __init__(self, builtin: BuiltinEngine, port: int) -> None:
        self._builtin = builtin
        self.pid = os.getpid()
        self.port = port

    async def load(self, folder: Path, label: str) -> None:
        success, message = await self._builtin.update_from_disk(str(folder), label, flush_cache=True)
        if not success:
            raise Unavailable(message)

    async def served_version(self) -> str:
        return self._builtin.weight_version

    async def wait(self) -> None:
        await self._builtin.engine.wait()


@asynccontextmanager
async def start_in_process(
    config: ExperimentConfig, placement: Placement, folder: Path, label: str
) -> AsyncIterator[BuiltinAdapter]:
    """The built-in engine and its HTTP API, for as long as the block runs."""
    inference = config.inference
    settings = BuiltinSettings(
        folder=folder,
        label=label,
        weights_roots=(config.paths.weights,),
        device=inference.device,
        dtype=inference.dtype,
        threads=inference.threads,
        context_length=inference.context_length,
        seed=_seed(config.seed, placement.instance),
        engine=EngineSettings(max_running_requests=inference.max_running_requests),
    )
    async with (
        start_builtin(settings) as builtin,
        serve_http(cast(Any, create_app(builtin)), placement.host, placement.http_port) as port,
    ):
        yield BuiltinAdapter(builtin, port)


def _seed(seed: int, instance: str) -> int:
    """A seed for each instance."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{instance}".encode()).digest()[:8], "little")
