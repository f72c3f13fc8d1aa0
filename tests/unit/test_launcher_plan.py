"""Which processes are started, with which devices and threads; and what is refused before anything starts."""

import socket
import sys
from pathlib import Path

import pytest

from headway.config import load_experiment
from headway.config.machine import find_etcd
from headway.errors import InvalidInput
from headway.launcher.plan import Launch, move_aside
from headway.launcher.preflight import preflight

FILE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def launch(*overrides: str) -> Launch:
    given = [f"actor.path={FILE.parent / 'models' / 'sort_digits'}", *overrides]
    return Launch(load_experiment(FILE, given), FILE, given)


def test_the_trainer_of_one_rank_needs_no_torchrun_and_one_of_two_has_it() -> None:
    assert launch().trainer("x:1").argv[:3] == [sys.executable, "-m", "services.trainer"]
    assert "--nproc-per-node=2" in launch("allocation_mode=sglang:d1+d2").trainer("x:1").argv


def test_services_read_the_same_file_with_the_same_overrides() -> None:
    command = launch("seed=3").service("reward", 1, "127.0.0.1:7")
    assert f"--config={FILE}" in command.argv
    assert command.argv[-1] == "seed=3"
    assert command.name == "reward/1"


def test_gpus_are_given_out_once_engines_first() -> None:
    gpus = launch("cluster.n_gpus_per_node=4", "allocation_mode=sglang:d1t2+d2", "inference.engine=sglang")
    assert gpus.service("inference", 0, "x:1").environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert gpus.trainer("x:1").environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in gpus.service("reward", 0, "x:1").environment


def test_environment_variables_of_the_file_reach_their_service() -> None:
    command = launch("+actor.scheduling_spec=[{env_vars: {NCCL_DEBUG: INFO}}]").trainer("x:1")
    assert command.environment["NCCL_DEBUG"] == "INFO"


def test_a_trainer_that_cannot_recover_is_not_started_again() -> None:
    assert launch().trainer("x:1").retries == 0
    assert launch("recover.mode=auto", "recover.freq_steps=1", "recover.retries=2").trainer("x:1").retries == 2


def test_a_missing_etcd_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InvalidInput, match=r"no etcd binary on PATH.*cluster\.name_resolve\.etcd3_addr"):
        find_etcd()


def test_a_missing_model_folder_and_a_port_in_use_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"actor\.path: there is no folder no/such/folder"):
        preflight(launch("actor.path=no/such/folder").config)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"services\.controller_http_port: port {port} on 127.0.0.1 is in use"):
            preflight(launch(f"services.controller_http_port={port}").config)


def test_an_earlier_run_is_moved_aside_whole(tmp_path: Path) -> None:
    config = launch(f"cluster.fileroot={tmp_path}").config
    for path in (config.paths.weights, config.paths.journal):
        path.mkdir(parents=True)
        (path / "file").touch()
    moved = dict(move_aside(config))
    assert set(moved) == {config.paths.weights, config.paths.journal}
    assert all((target / "file").exists() for target in moved.values())
    assert not config.paths.weights.exists()
    assert list(move_aside(config)) == []
