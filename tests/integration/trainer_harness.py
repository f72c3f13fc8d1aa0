"""What the trainer's tests run it against: a real name-resolve, a scripted rollout controller, a very small model."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import ExperimentConfig
from headway.runtime.names import NameClient
from headway.runtime.service import Placement
from headway.testing.scripted_controller import ScriptedController, random_group, serve
from services.name_resolve import app as name_resolve

ROOT = Path(__file__).parents[2]
BATCH = 4
SAMPLES = 4


@dataclass
class Stage:
    """A trial without its trainer."""

    config: ExperimentConfig
    config_file: Path
    name_resolve: str
    controller: ScriptedController
    names: NameClient

    def placement(self, instance: str = "0") -> Placement:
        return Placement(name_resolve=self.name_resolve, instance=instance, run_dir=self.config.paths.run)


def small_model(folder: Path) -> Path:
    """The quickstart's model and tokenizer with 16 hidden units and 2 layers."""
    shutil.copytree(ROOT / "configs/models/sort_digits", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"head_dim": 8, "intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(folder: Path, steps: int) -> dict[str, Any]:
    """An experiment of a few short steps."""
    rows = {"path": "python:examples.sort_digits.rows", "max_rows": 64}
    return {
        "experiment_name": "test",
        "total_train_steps": steps,
        "cluster": {"fileroot": str(folder / "files"), "name_resolve": {"type": "memory"}},
        "allocation_mode": "sglang:d1+d1",
        "rollout": {"max_head_offpolicyness": 1},
        "gconfig": {"n_samples": SAMPLES, "max_new_tokens": 8},
        "actor": {
            "path": str(small_model(folder / "model")),
            "init_from_scratch": True,
            "dtype": "float32",
            "mb_spec": {"max_tokens_per_mb": 256},
            "optimizer": {"lr": 1e-2},
            "ppo_n_minibatches": 2,
            "recompute_logprob": True,
            "use_decoupled_loss": True,
        },
        "train_dataset": {**rows, "batch_size": BATCH},
        "evaluator": {"at_start": False, "at_end": False},
    }


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with nested changes."""
    result = dict(base)
    for key, value in changes.items():
        is_section = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if is_section else value
    return result


@asynccontextmanager
async def stage(
    folder: Path, steps: int = 3, make: type[ScriptedController] = ScriptedController, **changes: Any
) -> AsyncIterator[Stage]:
    """Name-resolve and the scripted controller, registered."""
    content = merged(settings(folder, steps), changes)
    config_file = folder / "experiment.yaml"
    config_file.write_text(json.dumps(content))
    config = ExperimentConfig.model_validate(content)
    controller = make(random_group, eta=config.rollout.max_head_offpolicyness)
    async with name_resolve.run(config, Placement()) as running:
        address = f"127.0.0.1:{running.ports['grpc']}"
        async with NameClient(address, config.run_name) as names, serve(controller) as controller_address:
            await names.register("services/rollout-controller/0", controller_address)
            yield Stage(config, config_file, address, controller, names)


@dataclass
class TrainerProcess:
    """A trainer that was forked."""

    pid: int
    ended: asyncio.Future[int]
    """Its exit code; minus the signal that killed it."""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Zygote:
    """Starts trainers as processes of their own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._forked: asyncio.Queue[int] = asyncio.Queue()
        self._running: dict[int, asyncio.Future[int]] = {}

    async def start(
        self,
        trial: Stage,
        at: str = "",
        occurrence: int = 1,
        hit: signal.Signals = signal.SIGKILL,
        instance: str = "0",
        lease_s: float = 10.0,
    ) -> TrainerProcess:
        """Fork a trainer that sends itself `hit` at a point of its timeline; see `trainer_zygote`."""
        order = {
            "config": str(trial.config_file),
            "name_resolve": trial.name_resolve,
            "instance": instance,
            "at": at,
            "occurrence": occurrence,
            "signal": int(hit),
            "lease_s": lease_s,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        pid = await self._forked.get()
        return TrainerProcess(pid, self._running[pid])

    async def listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            if "status" in told:
                self._running[told["pid"]].set_result(told["status"])
            else:
                self._running[told["pid"]] = asyncio.get_running_loop().create_future()
                self._forked.put_nowait(told["pid"])


@asynccontextmanager
async def zygote(log: Path) -> AsyncIterator[Zygote]:
    """A process that forks trainers; what they log goes to a file. None outlives the block."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("trainer_zygote.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=environment,
            cwd=ROOT,
        )
        forks = Zygote(process)
        listening = asyncio.create_task(forks.listen())
        try:
            yield forks
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
            await listening
