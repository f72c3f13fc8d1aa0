"""Children are watched and ended together: none outlives the launch, and a failure is told with its last lines."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from headway.errors import HeadwayError, TimedOut
from headway.launcher.processes import KILL_GRACE_S, TERMINATE_GRACE_S, ChildFailed, Command, processes

READY = """print('HEADWAY_READY {"ports": {"grpc": 7}}', flush=True)"""
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; time.sleep(600)"
GRANDCHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


def python(name: str, code: str, may_end: bool = False) -> Command:
    return Command(name, [sys.executable, "-c", code], may_end=may_end)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_readiness_gives_the_ports(tmp_path: Path) -> None:
    async with processes(tmp_path) as running:
        child = await running.start(python("reward/0", f"{READY}\nimport time; time.sleep(600)"))
        await running.guarded(child.ready(30))
        assert child.ports == {"grpc": 7}
    assert not is_alive(child.pid)


async def test_a_failure_ends_the_wait_with_name_code_and_last_lines(tmp_path: Path) -> None:
    async with processes(tmp_path) as running:
        await running.start(python("etcd/0", "import time; time.sleep(600)"))
        child = await running.start(python("reward/0", "print('no such model', flush=True); raise SystemExit(3)"))
        with pytest.raises(ChildFailed, match=r"reward/0 ended \(exit code 3\)(?s:.*)no such model"):
            await running.guarded(child.ready(30))
    assert not any(is_alive(other.pid) for other in running.children)


async def test_ending_well_is_a_failure_only_for_those_that_should_stay(tmp_path: Path) -> None:
    async with processes(tmp_path) as running:
        trainer = await running.start(python("trainer/0", "pass", may_end=True))
        await running.guarded(trainer.has_ended.wait())
        assert trainer.returncode == 0
        await running.start(python("reward/0", "pass"))
        with pytest.raises(ChildFailed, match="reward/0 ended"):
            await running.guarded(asyncio.Event().wait())


def test_the_limits_add_up_to_less_than_ten_seconds() -> None:
    assert TERMINATE_GRACE_S + 2 * KILL_GRACE_S < 10


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.launcher.processes.TERMINATE_GRACE_S", 0.2)
    async with processes(tmp_path) as running:
        child = await running.start(python("trainer/0", STUBBORN))
        await child.ready(30)
    assert child.returncode == -9


async def test_what_a_child_leaves_behind_is_killed(tmp_path: Path) -> None:
    async with processes(tmp_path) as running:
        child = await running.start(python("trainer/0", GRANDCHILD, may_end=True))
        await running.guarded(child.has_ended.wait())
        grandchild = int(child.last_lines[-1])
        assert is_alive(grandchild)
    deadline = asyncio.get_running_loop().time() + 10
    while is_alive(grandchild):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_a_child_with_retries_is_started_again_unless_it_made_a_mistake(tmp_path: Path) -> None:
    failures: list[str] = []
    mark = tmp_path / "mark"
    code = (
        f"import pathlib, os; p = pathlib.Path({str(mark)!r}); done = p.exists(); p.touch(); os._exit(0 if done else 9)"
    )
    argv = [sys.executable, "-c", code]
    async with processes(tmp_path, lambda failure: failures.append(str(failure))) as running:
        trainer = await running.start(Command("trainer/0", argv, may_end=True, retries=2))
        await running.guarded(trainer.has_ended.wait())
        assert trainer.returncode == 0
        assert len(failures) == 1
        assert "trainer/0 ended (exit code 9)" in failures[0]
        await running.start(Command("trainer/1", [sys.executable, "-c", "raise SystemExit(2)"], retries=2))
        with pytest.raises(ChildFailed, match=r"trainer/1 ended \(exit code 2\)"):
            await running.guarded(asyncio.Event().wait())
    assert len(failures) == 1


async def test_silence_is_told_as_such(tmp_path: Path) -> None:
    async with processes(tmp_path) as running:
        child = await running.start(python("trainer/0", "import time; time.sleep(600)"))
        with pytest.raises(TimedOut, match="trainer/0 was not ready within 0 s"):
            await running.guarded(child.ready(0.1))


async def test_a_missing_program_is_named(tmp_path: Path) -> None:
    async with processes(tmp_path) as running:
        with pytest.raises(HeadwayError, match="no program 'no-such-program'"):
            await running.start(Command("etcd/0", ["no-such-program"]))


async def test_children_die_with_a_killed_launcher(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib, signal, sys
from headway.launcher.processes import Command, processes
async def main():
    async with processes(pathlib.Path({str(tmp_path)!r})) as running:
        child = await running.start(Command("x/0", [sys.executable, "-c", "import time; time.sleep(600)"]))
        print(child.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env={**os.environ}
    )
    assert launcher.stdout is not None
    pid = int(await asyncio.wait_for(launcher.stdout.readline(), 30))
    assert is_alive(pid)
    launcher.kill()
    await launcher.wait()
    deadline = asyncio.get_running_loop().time() + 10
    while is_alive(pid):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
