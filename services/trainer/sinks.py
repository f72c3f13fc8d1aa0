"""Where records of statistics go: a file of JSON lines, TensorBoard, W&B, SwanLab."""

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import orjson

from headway.config import ExperimentConfig, plain
from headway.config.observe import WandBConfig

WANDB_PATIENCE_S = 30
log = logging.getLogger(__name__)


class Sink(Protocol):
    """Somewhere that records go."""

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Let nothing be lost."""


class JsonlSink:
    """One JSON object a line; lines of steps after `step` are dropped at the start."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, step) if path.exists() else []
        aside = path.with_suffix(".new")
        aside.write_bytes(b"".join(kept))
        aside.replace(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(dict(record)).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Event files."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(path), purge_step=step + 1)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float) and name != "time":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandBSink:
    """Weights & Biases; `offline` needs no network, and `online` becomes it where the server cannot be reached."""

    def __init__(self, config: ExperimentConfig) -> None:
        wandb = importlib.import_module("wandb")
        settings = config.stats_logger.wandb
        about = {
            "project": settings.project or config.experiment_name,
            "entity": settings.entity,
            "name": settings.name or config.trial_name,
            "id": f"{config.experiment_name}_{config.trial_name}_{settings.id_suffix}",
            "resume": "allow",
            "job_type": settings.job_type,
            "group": settings.group or config.run_name,
            "notes": settings.notes,
            "tags": settings.tags,
            "dir": str(config.paths.logs),
            "config": settings.config or plain(config),
        }
        self._run: Any = _init_wandb(wandb, settings, about)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()


def _init_wandb(wandb: Any, settings: WandBConfig, about: Mapping[str, Any]) -> Any:
    if settings.mode == "online":
        try:
            if key := settings.key():
                wandb.login(key=key, host=settings.wandb_base_url, timeout=WANDB_PATIENCE_S)
            return wandb.init(mode="online", settings=wandb.Settings(init_timeout=WANDB_PATIENCE_S), **about)
        except Exception as error:  # noqa: BLE001 - wandb raises kinds of its own for a network that is away
            log.warning("W&B cannot be reached, its run is kept offline in %s: %s", about["dir"], error)
    return wandb.init(mode="offline", **about)


class SwanLabSink:
    """SwanLab."""

    def __init__(self, config: ExperimentConfig) -> None:
        swanlab = importlib.import_module("swanlab")
        settings = config.stats_logger.swanlab
        if settings.mode == "cloud" and (key := settings.key()):
            swanlab.login(api_key=key)
        self._run: Any = swanlab.init(
            mode=settings.mode,
            project=settings.project or config.experiment_name,
            experiment_name=settings.name or config.trial_name,
            logdir=settings.logdir or str(config.paths.logs / "swanlab"),
            config=settings.config or plain(config),
        )

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in record.items() if isinstance(value, float)}, step=step)

    def close(self) -> None:
        self._run.finish()


def sinks_of(config: ExperimentConfig, step: int) -> list[tuple[str, Callable[[], Sink]]]:
    logger = config.stats_logger
    sinks: list[tuple[str, Callable[[], Sink]]] = []
    sinks.append(("stats.jsonl", lambda: JsonlSink(config.paths.logs / "stats.jsonl", step)))
    if (path := logger.tensorboard.path) is not None:
        sinks.append(("TensorBoard", lambda: TensorBoardSink(Path(path), step)))
    if logger.wandb.mode != "disabled":
        sinks.append(("W&B", lambda: WandBSink(config)))
    if logger.swanlab.mode not in (None, "disabled"):
        sinks.append(("SwanLab", lambda: SwanLabSink(config)))
    return sinks


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The whole lines of a file whose step is not after `step`; a torn last line is dropped."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or orjson.loads(line)["step"] > step:
            break
        kept.append(line)
    return kept
