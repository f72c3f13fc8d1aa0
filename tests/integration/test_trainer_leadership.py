"""One trainer leads, the other waits, warm. A leader that was frozen past its lease changes nothing when it wakes.

Trainers are processes; the frozen one stops itself by SIGSTOP at a point of its step, and is woken when its successor
has finished the run.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from trainer_harness import BATCH, Stage, Zygote, stage, zygote

from headway.core.version import PolicyVersion
from headway.runtime.grpc_client import connect
from headway.v1 import trainer_pb2 as pb
from headway.v1.trainer_pb2_grpc import TrainerStub
from services.trainer.checkpoint import CheckpointStore

STEPS = 4
LEASE_S = 1.5
DEADLINE_S = 100.0
RECOVER = {"recover": {"mode": "auto", "freq_steps": 2, "freq_secs": None, "freq_epochs": None}}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Zygote]:
    async with zygote(tmp_path_factory.mktemp("zygote") / "trainers.log") as made:
        yield made


async def phase_of(trial: Stage, instance: str) -> int:
    """The phase of a trainer, once it is registered."""
    entry = (await trial.names.wait(f"services/trainer/{instance}", timeout_s=30))[0]
    channel = connect(entry.value)
    try:
        return (await TrainerStub(channel).GetStatus(pb.GetStatusRequest())).phase
    finally:
        await channel.close()


async def until_standby(trial: Stage, instance: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await phase_of(trial, instance) == pb.TRAINER_PHASE_STANDBY:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [
        ("end update", 2),
        ("end write", 3),
        ("end publish", 3),
        ("mark checkpoint hashed", 2),
        ("begin wait_for_batch", 4),
    ],
)
async def test_a_frozen_leader_changes_nothing_when_it_wakes(
    forks: Zygote, tmp_path: Path, point: str, occurrence: int
) -> None:
    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        frozen = await forks.start(trial, point, occurrence, signal.SIGSTOP, instance="0", lease_s=LEASE_S)
        await trial.controller.until(lambda seen: len(seen.begins) == 1)
        successor = await forks.start(trial, instance="1", lease_s=LEASE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert await successor.ended == 0
        published = await trial.names.get_version()
        newest = CheckpointStore(trial.config.paths.recover, keep_last=2).newest()
        commits, consumed = len(trial.controller.commits), list(trial.controller.consumed)
        frozen.signal(signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            assert await frozen.ended == 2
        assert published is not None
        assert published.version == PolicyVersion(2, STEPS)
        assert await trial.names.get_version() == published
        after = CheckpointStore(trial.config.paths.recover, keep_last=2).newest()
        assert after == newest
        assert (trial.config.paths.recover / "latest").read_text() == f"v2.{STEPS}"
        assert len(trial.controller.commits) == commits
        assert trial.controller.consumed == consumed
        assert len(set(consumed)) == len(consumed) == STEPS * BATCH


async def test_the_second_trainer_waits_until_the_first_has_ended(forks: Zygote, tmp_path: Path) -> None:
    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        await trial.controller.open(False)
        first = await forks.start(trial, instance="0", lease_s=LEASE_S)
        await trial.controller.until(lambda seen: len(seen.begins) == 1)
        second = await forks.start(trial, instance="1", lease_s=LEASE_S)
        await until_standby(trial, "1")
        await trial.controller.open(True)
        async with asyncio.timeout(DEADLINE_S):
            assert await first.ended == 0
            assert await second.ended == 0
        assert [begin[1:] for begin in trial.controller.begins] == [(0, True), (STEPS, False)]
        assert len(trial.controller.commits) == STEPS
