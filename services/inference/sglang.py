"""SGLang as the engine: `python -m sglang.launch_server`, or what `inference.command` says.

Its streams carry what is new: by default each event repeats the whole reply with all log-probabilities, which makes a
reply of n events cost both sides n / 2 replies.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headway.config import ExperimentConfig
from headway.runtime.service import Placement
from services.inference.child import Child, ask, child_process, free_port
from services.inference.keys import admin_key, api_key

COMMAND = (sys.executable, "-m", "sglang.launch_server")
ENVIRONMENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""Without it, /health hangs while generation is paused, and marks the server as broken."""


class SGLangEngine:
    """A running SGLang server."""

    kind = "sglang"

    def __init__(self, child: Child, host: str, port: int, config: ExperimentConfig) -> None:
        self._key, self._admin_key = api_key(config), admin_key(config)
        self._child = child
        self._url = f"http://{host}:{port}"
        self.pid = child.pid
        self.port = port

    async def load(self, folder: Path, label: str) -> None:
        """Update the weights while no request runs."""
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        await ask("POST", f"{self._url}/update_weights_from_disk", body, key=self._admin_key)

    async def served_version(self) -> str:
        info = await ask("GET", f"{self._url}/model_info", key=self._key)
        return str(info["weight_version"])

    async def is_ready(self) -> bool:
        await ask("GET", f"{self._url}/ready", timeout_s=5, key=self._key)
        return True

    async def wait(self) -> None:
        await self._child.wait()


def command_of(config: ExperimentConfig, placement: Placement, folder: Path, label: str, port: int) -> list[str]:
    """The command line of one server."""
    flags = config.sglang.model_copy(update={"model_path": str(folder)})
    if flags.random_seed is None:
        flags = flags.model_copy(update={"random_seed": config.seed + _number(placement.instance)})
    if "incremental_streaming_output" not in flags.flags():
        flags = flags.model_copy(update={"incremental_streaming_output": True})
    if config.actor.use_lora:
        flags = flags.model_copy(update=_adapter_flags(config))
    address = ["--host", placement.host, "--port", str(port), "--weight-version", label]
    tensor = config.allocation.inference.tensor
    parallel = ["--tp-size", str(tensor)] if tensor > 1 else []
    return [*(config.inference.command or COMMAND), *flags.words(), *parallel, *address]


def _adapter_flags(config: ExperimentConfig) -> dict[str, object]:
    """What SGLang must know of adapters before the first one comes."""
    modules = config.actor.target_modules or ["all"]
    return {"enable_lora": True, "max_lora_rank": config.actor.lora_rank, "lora_target_modules": modules}


def _number(instance: str) -> int:
    return int(instance) if instance.isdigit() else 0


@asynccontextmanager
async def start_sglang(
    config: ExperimentConfig, placement: Placement, folder: Path, label: str
) -> AsyncIterator[SGLangEngine]:
    """Run a server for as long as the block runs; yields when it answers.

    Raises:
        InvalidInput: The command cannot be started.
        Unavailable, TimedOut: It ended, or did not answer in time.
    """
    port = placement.http_port or free_port(placement.host)
    command = command_of(config, placement, folder, label, port)
    log = placement.run_dir / f"inference-{placement.instance}-sglang.log"
    async with child_process("SGLang", command, ENVIRONMENT, log) as child:
        engine = SGLangEngine(child, placement.host, port, config)
        await child.ready(engine.is_ready, config.inference.start_timeout_s)
        yield engine
