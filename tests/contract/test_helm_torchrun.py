"""The command that the chart gives to the trainer's nodes: they meet, and meet again after one of them was lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helm_chart import container, rendered

from services.inference.child import free_port

DEADLINE_S = 200.0
RANK = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "with", sys.argv[1], flush=True)
if not os.path.exists("second life"):  # a rank that is busy does not notice that another one is gone
    time.sleep(1000)
dist.barrier()
"""


class Node:
    """One pod of the set, as processes of this machine."""

    def __init__(self, folder: Path, number: int, port: int) -> None:
        trainer = container(rendered("--set=trainer.replicas=2"), "trainer")
        (endpoint,) = {word for word in trainer["command"][5].split() if word.startswith("--rdzv-endpoint=")}
        command = trainer["command"][5].replace(endpoint, f"--rdzv-endpoint=127.0.0.1:{port}")
        command = command.replace("$HOSTNAME.headway-trainer.test.svc", "127.0.0.1").replace(
            "-m services.trainer", "rank.py"
        )
        environment = {one["name"]: one["value"] for one in trainer["env"] if "value" in one}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOSTNAME": f"trainer-{number}"}
        self.log = folder / f"{number}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            shell = ["sh", "-c", command, "torchrun", trainer["args"][0]]
            self.process = subprocess.Popen(
                shell, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_met(self) -> bool:
        return "of 2 with cluster.fileroot" in self.log.read_text()

    def lose(self) -> None:
        """As if the machine was gone: torchrun and its ranks, each of which leads a group of its own."""
        ranks = subprocess.run(
            ["pgrep", "--parent", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split()
        for pid in (self.process.pid, *map(int, ranks)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} within {DEADLINE_S:g} s"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(4 * DEADLINE_S)
def test_a_node_that_was_lost_comes_back_and_all_start_again(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port("127.0.0.1")
    second = Node(tmp_path, 1, port)
    first = Node(tmp_path, 0, port)
    nodes = [first, second]
    try:
        wait_for("the nodes meet", lambda: first.has_met() and second.has_met())
        second.lose()
        (tmp_path / "second life").touch()
        nodes.append(again := Node(tmp_path, 1, port))
        assert again.process.wait(DEADLINE_S) == 0, again.log.read_text()
        assert first.process.wait(DEADLINE_S) == 0, first.log.read_text()
        assert again.has_met()
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.lose()
