"""Decide which processes `headway up` starts, with which arguments, devices and threads.

    etcd -> name-resolve -> reward, rollout-controller, trainer, inference/0 .. inference/(d-1)

Pure but for looking at the machine: the programs on it and the number of its cores.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config import ExperimentConfig
from headway.config.cluster import SchedulingSpec
from headway.config.machine import find_etcd
from headway.launcher.processes import Command
from headway.launcher.token import VARIABLE, token_file

ETCD_QUOTA_BYTES = 1 << 30


@dataclass(frozen=True)
class Launch:
    """One launch of one experiment file."""

    config: ExperimentConfig
    file: Path
    overrides: Sequence[str]

    def service(self, name: str, instance: int, name_resolve: str, http_port: int = 0) -> Command:
        """The command of one of our services; the trainer has its own.

        Args:
            name: As in name-resolve: "rollout-controller".
            instance: Number among the replicas.
            name_resolve: "host:port"; empty for name-resolve itself.
            http_port: 0 takes any free one.
        """
        return self._command(name, instance, name_resolve, [sys.executable, "-m"], http_port)

    def trainer(self, name_resolve: str) -> Command:
        """The trainer: one process, or torchrun where it has several ranks."""
        ranks = self.config.allocation.training.world_size
        if ranks == 1:
            return self._command("trainer", 0, name_resolve, [sys.executable, "-m"], 0)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        return self._command("trainer", 0, name_resolve, torchrun, 0)

    def _command(self, name: str, instance: int, name_resolve: str, run: Sequence[str], http_port: int) -> Command:
        options = {
            "config": str(self.file),
            "instance": str(instance),
            "name-resolve": name_resolve,
            "host": self.config.services.host,
            "http-port": str(http_port),
            "run-dir": str(self.config.paths.run),
        }
        flags = [f"--{option}={value}" for option, value in options.items() if value]
        argv = [*run, f"services.{name.replace('-', '_')}", *flags, *self.overrides]
        return Command(
            f"{name}/{instance}",
            argv,
            self._environment(name, instance),
            is_foundation=name == "name-resolve",
            may_end=name == "trainer",
            retries=self._retries(name),
        )

    def _retries(self, name: str) -> int:
        """The trainer continues from its checkpoint; without one, starting it again would start the run again."""
        recover = self.config.recover
        return recover.retries if name == "trainer" and recover.mode != "disabled" else 0

    def _environment(self, name: str, instance: int) -> dict[str, str]:
        environment = {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        environment["OMP_NUM_THREADS"] = str(self._num_threads(name))
        if name == "rollout-controller" and (path := token_file(self.config.paths.run)) is not None:
            environment[f"{VARIABLE}_FILE"] = str(path)
        if name == "trainer":  # engines wait until it is over
            ranks = self.config.allocation.training.world_size
            environment["HEADWAY_WARM_START_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        if devices := self._devices(name, instance):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        for spec in self._scheduling_specs(name):
            environment |= spec.env_vars
        return environment

    def _num_threads(self, name: str) -> int:
        """Engines have theirs from the file; the trainer's ranks share the cores that are left."""
        engine_threads = self.config.inference.threads
        if name == "inference":
            return engine_threads
        if name != "trainer":
            return 1
        left = (os.cpu_count() or 1) - engine_threads * self.config.allocation.num_servers
        share = max(1, left // self.config.allocation.training.world_size)
        return min([share, *(spec.cpu * max(1, spec.gpu) for spec in self._scheduling_specs(name))])

    def _devices(self, name: str, instance: int) -> range:
        """GPUs of a process: engines first, the trainer behind them, or the same ones in colocation."""
        allocation = self.config.allocation
        if self.config.cluster.n_gpus_per_node == 0:
            return range(0)
        each = allocation.inference.world_size // allocation.num_servers
        if name == "inference":
            return range(instance * each, (instance + 1) * each)
        first = 0 if allocation.is_colocated else allocation.inference.world_size
        return range(first, first + allocation.training.world_size) if name == "trainer" else range(0)

    def _scheduling_specs(self, name: str) -> list[SchedulingSpec]:
        specs = {"trainer": self.config.actor.scheduling_spec, "inference": self.config.rollout.scheduling_spec}
        return specs.get(name, [])


def etcd(data: Path, client_port: int, peer_port: int) -> Command:
    """A single etcd on loopback.

    Raises:
        InvalidInput: No etcd binary can be found.
    """
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    options = {
        "name": "headway",
        "data-dir": str(data),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"headway={peer}",
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": "10000",
        "quota-backend-bytes": str(ETCD_QUOTA_BYTES),
        "log-level": "warn",
    }
    argv = [find_etcd(), *(f"--{option}={value}" for option, value in options.items())]
    return Command("etcd/0", argv, is_foundation=True)


def move_aside(config: ExperimentConfig) -> Iterator[tuple[Path, Path]]:
    """Rename what an earlier run of the same trial has left, so that nothing is overwritten and nothing stale is found.

    Yields:
        (old folder, its new name).
    """
    paths = config.paths
    kinds = [paths.run, paths.logs, paths.weights, paths.checkpoints, paths.recover]
    kinds += [paths.rollouts, paths.eval_rollouts, paths.journal, paths.traces]
    number = 1
    while any(path.with_name(f"{path.name}.{number}").exists() for path in kinds):
        number += 1
    for path in kinds:
        if path.exists():
            target = path.with_name(f"{path.name}.{number}")
            path.rename(target)
            yield path, target
