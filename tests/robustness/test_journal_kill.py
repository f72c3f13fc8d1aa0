"""`kill -9` at any moment: every group whose write was acknowledged is there afterwards, whole; batches too.

| what is killed             | how often | seen so far                        |
|----------------------------|-----------|------------------------------------|
| a process that only writes | 4 a run   | no acknowledged record ever lost   |
"""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from services.rollout_controller.journal_store import JournalStore

WRITER = """
import asyncio, sys
from pathlib import Path
from services.rollout_controller.journal import Journal
from services.rollout_controller.journal_store import GroupRecord

async def append(journal, row):
    payload = b"%d," % row * 2000
    await journal.write(lambda store: store.append(GroupRecord(f"0/{row}", 1, 0, {0: 1}, b"{}", payload)))
    print("group", row, flush=True)

async def main():
    async with Journal(Path(sys.argv[1])) as journal:
        for step in range(10**6):
            rows = range(8 * step, 8 * step + 8)
            await asyncio.gather(*(append(journal, row) for row in rows))
            names = [f"0/{row}" for row in rows if row % 2]
            await journal.write(lambda store: store.lease(step, names, {}))
            print("batch", step, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("num_lines", [1, 9, 40, 90])
def test_what_was_acknowledged_before_the_kill_is_there_after_it(tmp_path: Path, num_lines: int) -> None:
    path = tmp_path / "journal.sqlite"
    lines = acknowledged_until_killed(path, num_lines)
    assert len(lines) >= num_lines
    store = JournalStore(path)
    recovered = store.recover()
    assert recovered.damaged == []
    groups = {f"0/{row}" for kind, row in lines if kind == "group"}
    assert store.known(sorted(groups)) == groups
    batches = {step.step: step.task_ids for step in recovered.steps}
    for step in (int(number) for kind, number in lines if kind == "batch"):
        assert batches[step] == tuple(f"0/{row}" for row in range(8 * step, 8 * step + 8) if row % 2)
        payloads = [store.payload(number)[0] for number in store.ids_of(step)]
        assert payloads == [b"%d," % row * 2000 for row in range(8 * step, 8 * step + 8) if row % 2]
    store.close()


def acknowledged_until_killed(path: Path, num_lines: int) -> list[tuple[str, str]]:
    """What a writer said was safe, up to its end: it is killed as soon as it has said `num_lines` things."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(num_lines)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(kind, number) for kind, number in words]
