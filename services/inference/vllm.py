"""vLLM as the engine: its OpenAI server, or what `inference.command` says, with its routes for RL switched on."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headway.config import ExperimentConfig
from headway.runtime.service import Placement
from services.inference.child import Child, ask, child_process, free_port
from services.inference.keys import api_key

COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Without it, /pause, /collective_rpc and /update_weight_version do not exist."""
SERVED_MODEL_NAME = "policy"
LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities after the temperature, as SGLang gives them; vLLM's default is before it."""


class VLLMEngine:
    """A running vLLM server."""

    kind = "vllm"

    def __init__(self, child: Child, host: str, port: int, config: ExperimentConfig) -> None:
        self._key = api_key(config)
        self._child = child
        self._url = f"http://{host}:{port}"
        self.pid = child.pid
        self.port = port

    async def load(self, folder: Path, label: str) -> None:
        """Reload the weights in the workers while nothing is generated, then name them."""
        await ask("POST", f"{self._url}/pause?mode=wait&clear_cache=true", key=self._key)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await ask("POST", f"{self._url}/collective_rpc", reload, key=self._key)
        await self.name_weights(label)
        await ask("POST", f"{self._url}/resume", key=self._key)

    async def name_weights(self, label: str) -> None:
        """Have the server report `label`."""
        body = {"new_version": label}
        await ask("POST", f"{self._url}/update_weight_version", body, key=self._key)

    async def served_version(self) -> str:
        info = await ask("GET", f"{self._url}/weight_info", key=self._key)
        return str(info["weight_version"])

    async def is_ready(self) -> bool:
        await ask("GET", f"{self._url}/health", timeout_s=5, key=self._key)
        return True

    async def wait(self) -> None:
        await self._child.wait()


def command_of(config: ExperimentConfig, placement: Placement, folder: Path, port: int) -> list[str]:
    """The command line of one server."""
    flags = config.vllm.model_copy(update={"model": str(folder)})
    if flags.seed is None:
        number = int(placement.instance) if placement.instance.isdigit() else 0
        flags = flags.model_copy(update={"seed": config.seed + number})
    if "logprobs_mode" not in flags.flags():
        flags = flags.model_copy(update={"logprobs_mode": LOGPROBS_MODE})
    address = ["--host", placement.host, "--port", str(port)]
    routes = ["--enable-scale-out", "--served-model-name", SERVED_MODEL_NAME]
    tensor = config.allocation.inference.tensor
    parallel = ["--tensor-parallel-size", str(tensor)] if tensor > 1 else []
    return [*(config.inference.command or COMMAND), *flags.words(), *parallel, *routes, *address]


@asynccontextmanager
async def start_vllm(
    config: ExperimentConfig, placement: Placement, folder: Path, label: str
) -> AsyncIterator[VLLMEngine]:
    """Run a server for as long as the block runs; yields when it answers and reports `label`.

    Raises:
        InvalidInput: The command cannot be started.
        Unavailable, TimedOut: It ended, or did not answer in time.
    """
    port = placement.http_port or free_port(placement.host)
    log = placement.run_dir / f"inference-{placement.instance}-vllm.log"
    command = command_of(config, placement, folder, port)
    async with child_process("vLLM", command, ENVIRONMENT, log) as child:
        engine = VLLMEngine(child, placement.host, port, config)
        await child.ready(engine.is_ready, config.inference.start_timeout_s)
        await engine.name_weights(label)
        yield engine
