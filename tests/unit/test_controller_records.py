"""What is written of groups for people: every sample and every episode, in whole lines, beside the loop."""

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from headway.core.trajectory import NO_VERSION, Outcome, StopReason, Trajectory
from headway.errors import Unavailable
from headway.runtime.supervisor import Supervisor
from headway.testing.virtual_time import run_virtual
from headway.workflow.api import EpisodeResult, InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from services.rollout_controller.dumps import Dump, FinishedGroup
from services.rollout_controller.line_writer import MAX_BACKLOG, LineWriter
from services.rollout_controller.rollouts import GroupRunner, Records, TaskInput, timed
from services.rollout_controller.sessions import GroupSessions, SessionLines


class Letters:
    """Token 0 is `a`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def trajectory(versions: Sequence[int], reward: float = 1.0) -> Trajectory:
    stamps = np.array(versions, np.int32)
    ids = np.arange(len(stamps), dtype=np.int32)
    return Trajectory(
        ids, ids * np.float32(-0.5), stamps != NO_VERSION, stamps, reward, StopReason.LENGTH, {"turns": 2}
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def encode_to(path: Path) -> Any:
    return lambda items: {path: b"".join(orjson.dumps(item) + b"\n" for item in items)}


def test_a_line_of_a_dump_says_everything_of_its_sample(tmp_path: Path) -> None:
    group = FinishedGroup("0/7", 2, Outcome.ACCEPTED, [trajectory([-1, -1, 3, 4]), trajectory([-1, 3], 0.5)])
    ((path, content),) = Dump(tmp_path, Letters).encode([group]).items()  # type: ignore[arg-type]
    assert path == tmp_path / "4" / "samples.jsonl"
    first, second = (orjson.loads(line) for line in content.splitlines())
    assert first == {
        "task_id": "0/7",
        "sample": 0,
        "attempt": 2,
        "outcome": "accepted",
        "reward": 1.0,
        "stop_reason": "length",
        "version_min": 3,
        "version_max": 4,
        "seqlen": 4,
        "prompt_len": 2,
        "num_loss_tokens": 2,
        "prompt": "ab",
        "completion": "cd",
        "metrics": {"turns": 2},
        "token_ids": [0, 1, 2, 3],
        "logprobs": [0.0, -0.5, -1.0, -1.5],
        "versions": [-1, -1, 3, 4],
        "loss_mask": [0, 0, 1, 1],
    }
    assert (second["sample"], second["reward"], second["version_max"], second["prompt"]) == (1, 0.5, 3, "a")


def test_a_sample_without_a_generated_token_is_dumped_too(tmp_path: Path) -> None:
    group = FinishedGroup("0/7", 1, Outcome.REJECTED, [trajectory([-1, -1])])
    ((path, content),) = Dump(tmp_path, Letters).encode([group]).items()  # type: ignore[arg-type]
    assert path.parent.name == "0"
    line = orjson.loads(content)
    assert (line["version_min"], line["prompt"], line["completion"], line["outcome"]) == (None, "ab", "", "rejected")


async def test_everything_added_is_written_in_order_when_the_block_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    async with Supervisor() as supervisor:
        async with LineWriter("write", encode_to(path), supervisor, flush_at=7) as writer:
            for number in range(1000):
                await writer.room()
                writer.add(number)
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(1000))


async def test_lines_are_kept_until_there_are_enough(tmp_path: Path) -> None:
    written = threading.Event()
    path = tmp_path / "lines.jsonl"

    def encode(items: Sequence[int]) -> dict[Path, bytes]:
        written.set()
        return {path: b"x\n" * len(items)}

    async with Supervisor() as supervisor, LineWriter("write", encode, supervisor, flush_at=3) as writer:
        writer.add(1)
        writer.add(2)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not written.is_set()
        writer.add(3)
        assert await asyncio.to_thread(written.wait, 10)


async def test_a_slow_disk_slows_down_and_loses_nothing(tmp_path: Path) -> None:
    disk, path = threading.Event(), tmp_path / "lines.jsonl"

    def encode(items: Sequence[int]) -> dict[Path, bytes]:
        assert disk.wait(10)
        return {path: b"x\n" * len(items)}

    async def produce(writer: LineWriter[int], count: int) -> None:
        for number in range(count):
            await writer.room()
            writer.add(number)

    async with Supervisor() as supervisor, LineWriter("write", encode, supervisor) as writer:
        writer.add(-1)
        await asyncio.sleep(0)
        producing = asyncio.ensure_future(produce(writer, 10 * MAX_BACKLOG))
        for _ in range(100 * MAX_BACKLOG):
            await asyncio.sleep(0)
        assert not producing.done()
        disk.set()
        await producing
    assert path.read_bytes() == b"x\n" * (10 * MAX_BACKLOG + 1)


async def test_what_a_killed_process_left_of_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    async with Supervisor() as supervisor, LineWriter("write", encode_to(path), supervisor) as writer:
        writer.add({"c": 3})
    assert lines_of(path) == [{"a": 1}, {"c": 3}]


async def test_a_disk_that_cannot_be_written_ends_the_process_with_its_name(tmp_path: Path) -> None:
    async with Supervisor() as supervisor, LineWriter("write it", encode_to(tmp_path), supervisor) as writer:
        writer.add(1)
        with pytest.raises(Unavailable, match=f"write it: cannot write {tmp_path}: Is a directory"):
            await asyncio.wait_for(supervisor.wait(), 10)


async def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real_write = tmp_path / "lines.jsonl", os.write
    path.write_bytes(b"1\n")

    def write(descriptor: int, data: bytes) -> int:
        if len(data) == 1:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data[:-1])

    async with Supervisor() as supervisor, LineWriter("write", encode_to(path), supervisor) as writer:
        monkeypatch.setattr("services.rollout_controller.line_writer.os.write", write)
        writer.add(2)
        with pytest.raises(Unavailable, match="No space left"):
            await asyncio.wait_for(supervisor.wait(), 10)
        monkeypatch.undo()
    assert path.read_bytes() == b"1\n"


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def add(self, item: Any) -> None:
        self.items.append(item)

    async def room(self) -> None:
        return


class Engine:
    """Answers after 2 s."""

    def get_version(self) -> int:
        return 3

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        await asyncio.sleep(2.0)
        return ModelResponse(req.input_ids, [5], [-0.5], [3])


class TwoTurns(RolloutWorkflow):
    """Generates, scores, thinks for a second, generates; its third episode fails after the first turn."""

    def __init__(self, fails_at: int = 0) -> None:
        self._fails_at = fails_at
        self._num_begun = 0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        self._num_begun += 1
        number = self._num_begun
        await engine.agenerate(ModelRequest())
        if number == self._fails_at:
            raise KeyError("a bug")
        await score()
        await asyncio.sleep(1.0)
        await engine.agenerate(ModelRequest())
        return trajectory([-1, 3])


@timed
async def score() -> float:
    await asyncio.sleep(0.5)
    return 1.0


def sessions_of(workflow: RolloutWorkflow, folder: Path) -> list[dict[str, Any]]:
    kept = Kept()

    async def run() -> list[dict[str, Any]]:
        runner = GroupRunner(workflow, Engine(), 3, records=Records("evaluation", sessions=kept))
        await runner.run(TaskInput("0/7", b"{}"), attempt=2)
        ((path, content),) = SessionLines(folder).encode(kept.items).items()
        assert path == folder / "sessions.jsonl"
        return [orjson.loads(line) for line in content.splitlines()]

    return run_virtual(run())


def test_a_session_tells_its_phases_and_times(tmp_path: Path) -> None:
    first, *others = sessions_of(TwoTurns(), tmp_path)
    assert [other["sample"] for other in others] == [1, 2]
    assert first["began_at"] > 0
    del first["began_at"]
    assert first == {
        "task_id": "0/7",
        "sample": 0,
        "attempt": 2,
        "kind": "evaluation",
        "outcome": "accepted",
        "status": "finished",
        "error": "",
        "total_s": 5.5,
        "generate_s": 4.0,
        "reward_s": 0.5,
        "other_s": 1.0,
        "phases": [
            {"name": "generate", "start_s": 0.0, "end_s": 2.0},
            {"name": "reward", "start_s": 2.0, "end_s": 2.5},
            {"name": "generate", "start_s": 3.5, "end_s": 5.5},
        ],
    }


def test_episodes_that_fail_or_are_cancelled_leave_their_lines_too(tmp_path: Path) -> None:
    lines = sessions_of(TwoTurns(fails_at=2), tmp_path)
    assert [line["status"] for line in lines] == ["cancelled", "failed", "cancelled"]
    assert {line["outcome"] for line in lines} == {"workflow_error"}
    assert lines[1]["error"] == "KeyError: 'a bug'"


def test_a_withdrawn_task_leaves_the_lines_of_its_episodes() -> None:
    kept = Kept()

    async def run() -> None:
        runner = GroupRunner(TwoTurns(), Engine(), 3, records=Records(sessions=kept))
        running = asyncio.ensure_future(runner.run(TaskInput("0/7", b"{}"), attempt=1))
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait([running])

    run_virtual(run())
    (group,) = kept.items
    assert isinstance(group, GroupSessions)
    assert (group.outcome, len(group.sessions)) == (Outcome.CANCELLED, 3)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_group_is_dumped_whether_or_not_the_filter_takes_it(accepts: bool) -> None:
    kept = Kept()
    runner = GroupRunner(TwoTurns(), Engine(), 2, lambda group: accepts, records=Records(groups=kept))
    end = run_virtual(runner.run(TaskInput("0/7", b"{}"), attempt=1))
    (group,) = kept.items
    assert group.outcome is end.outcome
    assert len(group.trajectories) == 2
