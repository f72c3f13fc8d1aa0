"""The quickstart, whole: services come up, reward rises, the bound holds, nothing is lost, no process is left.

Everything is real: etcd, gRPC, engines that serve HTTP, a model that learns.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
READY = re.compile(r"^\s+(\S+)\s+ready\s.*\spid (\d+)", re.MULTILINE)
END_S = 60
"""Longest wait for the end: against hanging. How long it may take is said by the launcher's own limits."""
GONE_S = 10
SERVICES = {
    "etcd/0",
    "name-resolve/0",
    "reward/0",
    "rollout-controller/0",
    "trainer/0",
    "inference/0",
    "inference/1",
}


class Launch:
    """A running `headway up`, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""

    async def read_until(self, pattern: str, timeout_s: float = 120) -> str:
        """Read until the output has a match; the whole output so far."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while not re.search(pattern, self.text):
                line = await self.process.stdout.readline()
                assert line, f"ended before {pattern!r}:\n{self.text}"
                self.text += line.decode()
        return self.text

    async def end(self, timeout_s: float) -> int:
        """Read to the end; the exit code."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            self.text += (await self.process.stdout.read()).decode()
            return await self.process.wait()

    @property
    def pids(self) -> dict[str, int]:
        return {name: int(pid) for name, pid in READY.findall(self.text)}


@asynccontextmanager
async def headway_up(folder: Path, *overrides: str) -> AsyncIterator[Launch]:
    argv = [
        "-m",
        "headway",
        "up",
        "configs/quickstart.yaml",
        f"cluster.fileroot={folder}",
        "services.controller_http_port=0",
        *overrides,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield Launch(process)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def processes_of(folder: Path) -> list[int]:
    """Processes that have the run's folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and is_alive(int(entry.name)):
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                found.append(int(entry.name))
    return found


async def are_gone(folder: Path) -> bool:
    """Whether no process of the run is left, once those that were killed have ended."""
    deadline = asyncio.get_running_loop().time() + GONE_S
    while processes_of(folder):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def report_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("run/*/*/*/report.json")
    found: dict[str, Any] = json.loads(file.read_text())
    assert file.with_suffix(".html").stat().st_size > 10_000
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_quickstart_learns_within_the_bound_and_loses_nothing(tmp_path: Path) -> None:
    async with headway_up(tmp_path, "total_train_steps=24", "evaluator.freq_steps=null") as launch:
        code = await launch.end(580)
    assert code == 0, launch.text
    assert launch.pids.keys() == SERVICES
    assert not [pid for pid in launch.pids.values() if is_alive(pid)]
    assert await are_gone(tmp_path)

    report = report_of(tmp_path)
    assert report["num_steps"] == 24
    assert report["held_out_after"] > report["held_out_before"] + 0.15
    eta = report["staleness"]["eta"]
    assert eta == 2
    ages = {int(age): tokens for age, tokens in report["staleness"]["gradient_tokens"].items()}
    assert sum(ages.values()) > 0
    assert max(ages) <= eta
    assert max(ages) > 0, "nothing was generated ahead: this was no asynchronous run"
    tasks = report["tasks"]
    states = [number for state, number in tasks.items() if state not in ("submitted", "is_conserved")]
    assert tasks["submitted"] == sum(states)
    assert tasks["consumed"] == 24 * 32


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    async with headway_up(tmp_path) as launch:
        await launch.read_until(r"step [1-9]")
        launch.process.send_signal(signal.SIGINT)
        assert await launch.end(END_S) == 130
    assert await are_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_failed_child_ends_everything_and_is_named(tmp_path: Path) -> None:
    async with headway_up(tmp_path) as launch:
        await launch.read_until(r"step [1-9]")
        os.kill(launch.pids["inference/1"], signal.SIGKILL)
        assert await launch.end(END_S) == 2
    assert re.search(r"inference/1 ended \(killed by SIGKILL\)", launch.text)
    assert await are_gone(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.pth=x"], "actor.path"),
        (["actor.path=no/such/folder"], "no/such/folder"),
        (["cluster.name_resolve.type=zookeeper"], "cluster.name_resolve.type"),
    ],
)
async def test_a_mistake_is_one_clear_line(tmp_path: Path, overrides: list[str], expected: str) -> None:
    async with headway_up(tmp_path, *overrides) as launch:
        assert await launch.end(60) == 2
    assert expected in launch.text
    assert "Traceback" not in launch.text
    assert await are_gone(tmp_path)


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with headway_up(tmp_path, f"services.controller_http_port={port}") as launch:
        assert await launch.end(60) == 2
    server.close()
    assert f"port {port} on 127.0.0.1 is in use" in launch.text
    assert "Traceback" not in launch.text
