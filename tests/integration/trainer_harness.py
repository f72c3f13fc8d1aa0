"""What the trainer's tests run it against: a real name-resolve, a scripted rollout controller, a very small model."""

import json
import shutil
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
    controller = make(random_group)
    async with name_resolve.run(config, Placement()) as running:
        address = f"127.0.0.1:{running.ports['grpc']}"
        async with NameClient(address, config.run_name) as names, serve(controller) as controller_address:
            await names.register("services/rollout-controller/0", controller_address)
            yield Stage(config, config_file, address, controller, names)
