"""Where the files of a run are that people look at, for a run that goes on and for one that is over."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headway.config import ExperimentConfig
from headway.errors import InvalidInput

INDEX = "index.sqlite"
SAMPLES, TRAINED = "samples.jsonl", "trained.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """The folders of one trial."""

    name: str
    """Experiment and trial."""
    run: Path
    """The resolved configuration, the report, and the controller's last answers."""
    logs: Path
    rollouts: Path
    """Dumped groups (`{step}/samples.jsonl`), what the trainer made of them (`{step}/trained.jsonl`), the index."""
    eval_rollouts: Path
    weights: Path
    tokenizer: str = ""
    """A folder, or a name on the hub; empty: not known."""
    is_dumping: bool = True
    """Whether samples are written at all (`rollout.dump_to_file`)."""

    @classmethod
    def of(cls, config: ExperimentConfig) -> "RunFolder":
        """Those of an experiment."""
        paths = config.paths
        return cls(
            config.run_name,
            paths.run,
            paths.logs,
            paths.rollouts,
            paths.eval_rollouts,
            paths.weights,
            config.rollout.tokenizer_path,
            config.rollout.dump_to_file,
        )

    @classmethod
    def at(cls, path: Path) -> "RunFolder":
        """Those of a run, by its folder `{fileroot}/run/{user}/{experiment}/{trial}`.

        Raises:
            InvalidInput: There is no such folder, or it is not a run's.
        """
        path = path.expanduser().absolute()
        if not path.is_dir():
            raise InvalidInput(f"{path} is not a folder")
        if len(path.parts) < 5 or path.parts[-4] != "run":
            raise InvalidInput(
                f"{path} is not a run's folder: those are {{fileroot}}/run/{{user}}/{{experiment}}/{{trial}}"
            )
        config = _resolved(path / "config.yaml")

        def at(kind: str, section: str = "") -> Path:
            root = config.get(section, {}).get("fileroot")
            return (Path(root).expanduser().absolute() if root else path.parents[3]).joinpath(kind, *path.parts[-3:])

        return cls(
            "/".join(path.parts[-2:]),
            path,
            at("logs", "stats_logger"),
            at("rollout", "rollout"),
            at("eval-rollout", "evaluator"),
            at("weights"),
            config.get("rollout", {}).get("tokenizer_path") or "",
            config.get("rollout", {}).get("dump_to_file", True),
        )

    @property
    def dumps(self) -> Mapping[str, Path]:
        """Roots of dumped groups, by what they were made for."""
        return {"train": self.rollouts, "evaluation": self.eval_rollouts}


def _resolved(path: Path) -> dict[str, Any]:
    """The resolved configuration as plain data; empty where a run has left none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found
