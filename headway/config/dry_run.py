"""Try what a run needs, on this machine and without starting it: what `headway config check` tells.

    tokenizer -> model -> rows -> longest sequence -> workflow -> reward on a row -> engine, etcd, ports, disk, memory,
    devices

Each probe stands alone: one that fails is told, and the next ones go on with what there is.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from headway.config import machine
from headway.config.checks import engine_context
from headway.config.dataset import DatasetConfig
from headway.config.experiment import ExperimentConfig
from headway.config.machine import Result, Status
from headway.data import Dataset, Row, open_dataset
from headway.errors import HeadwayError, InvalidInput
from headway.reward.choose import function_for_dataset, function_for_row
from headway.workflow import load_filter, load_object
from headway.workflow.api import Tokenizer

START_S = 60.0
"""Time that a process has to start and import a reward function, beside the function's own limit."""


@dataclass(frozen=True)
class Finding:
    """What one probe found."""

    what: str
    status: Status
    text: str


@dataclass
class Ground:
    """What earlier probes found for later ones."""

    tokenizer: Tokenizer | None = None
    train: Dataset | None = None


def dry_run(config: ExperimentConfig) -> Iterator[Finding]:
    """Every finding, as soon as it is made."""
    ground = Ground()
    for what, probe in PROBES:
        try:
            result = probe(config, ground)
        except HeadwayError as error:
            result = Result(Status.BAD, str(error))
        if result is not None:
            yield Finding(what, result.status, result.text)


def _tokenizer(config: ExperimentConfig, ground: Ground) -> Result:
    path = config.tokenizer_path
    machine.model_folder("tokenizer_path", path)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return Result(Status.NOTE, "not tried: transformers is not installed here")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidInput(f"{path} cannot be loaded: {reason}") from error
    ground.tokenizer = cast(Tokenizer, tokenizer)
    template = "with a chat template" if tokenizer.chat_template else "without a chat template: rows need `prompt`"
    return Result(Status.OK, f"{path}: {len(tokenizer)} tokens, {template}")


def _model(config: ExperimentConfig, ground: Ground) -> Result:
    path = machine.model_folder("actor.path", config.actor.path)
    if path is None:
        return Result(Status.NOTE, f"{config.actor.path} is no folder here: it is fetched from the hub at the start")
    settings = model_settings(path)
    weights = sorted(path.glob("*.safetensors"))
    if not weights and not config.actor.init_from_scratch:
        raise InvalidInput(f"{path} has no *.safetensors, and actor.init_from_scratch is false")
    size = f"{sum(file.stat().st_size for file in weights) / machine.MB:.0f} MB of weights"
    source = "random weights" if config.actor.init_from_scratch else size
    return Result(Status.OK, f"{path}: {settings.get('model_type', 'unknown type')}, {source}")


def model_settings(folder: Path) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        InvalidInput: There is none, or it is not JSON.
    """
    try:
        settings: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())
    except OSError:
        raise InvalidInput(f"{folder} is no model folder: it has no config.json") from None
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{folder}/config.json is not JSON: {error}") from None
    return settings


def _train_rows(config: ExperimentConfig, ground: Ground) -> Result:
    ground.train = _open(config.train_dataset, config, ground)
    return Result(Status.OK, f"{ground.train.report()}; {ground.train.steps_per_epoch} steps an epoch")


def _valid_rows(config: ExperimentConfig, ground: Ground) -> Result | None:
    if config.valid_dataset is None:
        return None
    return Result(Status.OK, _open(config.valid_dataset, config, ground).report())


def _open(dataset: DatasetConfig, config: ExperimentConfig, ground: Ground) -> Dataset:
    if ground.tokenizer is None:
        dataset = dataset.model_copy(update={"max_length": None})
    return open_dataset(dataset, ground.tokenizer, config.seed)


def _longest(config: ExperimentConfig, ground: Ground) -> Result | None:
    """Whether the longest prompt and its completion fit the micro-batch, the engine and the model."""
    if ground.train is None or ground.tokenizer is None:
        return None
    task_id, prompt = ground.train.longest_prompt()
    longest = min(prompt + config.gconfig.max_new_tokens, config.gconfig.max_tokens)
    how = f"task {task_id}: a prompt of {prompt} + gconfig.max_new_tokens {config.gconfig.max_new_tokens}"
    bounds = {"actor.mb_spec.max_tokens_per_mb": config.actor.mb_spec.max_tokens_per_mb}
    bounds |= dict([engine_context(config)])
    path = Path(config.actor.path).expanduser()
    if path.is_dir():
        bounds["the model's max_position_embeddings"] = model_settings(path).get("max_position_embeddings")
    broken = [f"{name} is {bound}" for name, bound in bounds.items() if bound is not None and longest > bound]
    if broken:
        raise InvalidInput(f"{longest} tokens ({how}), but {', '.join(broken)}")
    return Result(Status.OK, f"{longest} tokens ({how})")


def _round_trip(config: ExperimentConfig, ground: Ground) -> Result | None:
    """Whether text survives the tokenizer: with the wrong class, spaces vanish and every reward is 0."""
    if ground.train is None or ground.tokenizer is None:
        return None
    text = _prompt_text(ground.train.rows[0])
    back = ground.tokenizer.decode(ground.tokenizer.encode(text, add_special_tokens=False))
    if back == text:
        return None
    return Result(Status.NOTE, f"the tokenizer does not give text back as it was: {text[:40]!r} became {back[:40]!r}")


def _prompt_text(row: Row) -> str:
    return str(row["messages"][-1].get("content", "")) if row.get("messages") else str(row["prompt"])


def _workflow(config: ExperimentConfig, ground: Ground) -> Result:
    kind = load_object(config.workflow.path)
    if not callable(getattr(kind, "arun_episode", None)):
        raise InvalidInput(f"{config.workflow.path} is no workflow: it has no method arun_episode(engine, data)")
    accept = load_filter(config.workflow.should_accept_fn)
    return Result(
        Status.OK, config.workflow.path + (f", filtered by {config.workflow.should_accept_fn}" if accept else "")
    )


def _reward(config: ExperimentConfig, ground: Ground) -> Result | None:
    """Score the first row's own answer, and an empty completion, with every function of the file."""
    if ground.train is None:
        return None
    row = ground.train.rows[0]
    told = [f"{name}: {_scored(name, config, row)}" for name in _functions(config, row)]
    return Result(Status.OK, f"on the first row, {'; '.join(told)}")


def _functions(config: ExperimentConfig, row: Row) -> list[str]:
    named = config.reward.function
    if named is None:
        return [function_for_dataset(config.train_dataset.path) or function_for_row(row)]
    return [named] if isinstance(named, str) else list(named)


def _scored(name: str, config: ExperimentConfig, row: Row) -> str:
    kwargs = config.reward.kwargs.get(name, config.reward.kwargs if isinstance(config.reward.function, str) else {})
    completions = [str(row.get("answer", "")), ""]
    request = {"function": name, "kwargs": kwargs, "row": row, "prompt": _prompt_text(row), "completions": completions}
    limit_s = config.reward.timeout_s * len(completions) + START_S
    try:
        argv = [sys.executable, "-m", "headway.config.reward_probe"]
        ended = subprocess.run(argv, input=orjson.dumps(request), capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidInput(f"{name} has not answered within {limit_s:.0f} s") from None
    if ended.returncode != 0:
        last = ended.stderr.decode(errors="replace").strip().splitlines()
        raise InvalidInput(f"{name} ended its process with {ended.returncode}: {last[-1] if last else 'no message'}")
    outcomes = orjson.loads(ended.stdout.splitlines()[-1])
    if broken := next((outcome for outcome in outcomes if outcome["status"] == "error"), None):
        raise InvalidInput(f"{name} fails: {broken['message']}")
    return ", ".join(
        f"{what} {_outcome(o)}" for what, o in zip(("its own answer", "an empty one"), outcomes, strict=False)
    )


def _outcome(outcome: dict[str, Any]) -> str:
    return (
        f"gets {outcome['reward']:g}" if outcome["status"] == "ok" else f"is {outcome['status']}: {outcome['message']}"
    )


def _on_machine(
    probe: Callable[[ExperimentConfig], Result | None],
) -> Callable[[ExperimentConfig, Ground], Result | None]:
    return lambda config, ground: probe(config)


PROBES: tuple[tuple[str, Callable[[ExperimentConfig, Ground], Result | None]], ...] = (
    ("tokenizer", _tokenizer),
    ("model", _model),
    ("train rows", _train_rows),
    ("valid rows", _valid_rows),
    ("longest sequence", _longest),
    ("round trip", _round_trip),
    ("workflow", _workflow),
    ("reward", _reward),
    ("engine", _on_machine(machine.engine)),
    ("etcd", _on_machine(machine.etcd)),
    ("ports", _on_machine(machine.ports)),
    ("disk", _on_machine(machine.disk)),
    ("memory", _on_machine(machine.memory)),
    ("devices", _on_machine(machine.devices)),
)
