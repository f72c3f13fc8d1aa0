"""A trainer that is killed anywhere ends where the uninterrupted run ends: the same weights, bit for bit.

The trainer is a process of its own and dies by SIGKILL; name-resolve and the scripted controller live on. Deterministic
mode: CPU, one thread; the groups of a step are the same for every trainer that asks.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file
from trainer_harness import BATCH, Stage, Zygote, stage, zygote

from headway.core.version import PolicyVersion

STEPS = 5
RECOVER = {
    "recover": {"mode": "auto", "freq_steps": 2, "freq_secs": None, "freq_epochs": None},
    "warm_start": {"steps": 2, "batch_size": 4, "lr": 1e-3},
}
DEADLINE_S = 100.0
POINTS = [
    ("begin warm_start", 1),
    ("end write", 1),
    ("end publish", 1),
    ("begin wait_for_batch", 4),
    ("end logprob", 4),
    ("end update", 4),
    ("end write", 5),
    ("end publish", 5),
    ("end commit", 4),
    ("mark checkpoint tensors written", 3),
    ("mark checkpoint hashed", 3),
    ("mark checkpoint named", 3),
    ("mark checkpoint latest", 3),
    ("end checkpoint", 3),
]
"""(event, occurrence): step 3 and the checkpoint of step 4, and the start. The first checkpoint is that of step 0."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Zygote]:
    log = tmp_path_factory.mktemp("zygote") / "trainers.log"
    async with zygote(log) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def uninterrupted(
    forks: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, np.ndarray], list[str]]:
    async with stage(tmp_path_factory.mktemp("uninterrupted"), steps=STEPS, **RECOVER) as trial:
        assert await run(forks, trial) == 0
        return final_weights(trial, term=1), trial.controller.consumed


async def run(forks: Zygote, trial: Stage, at: str = "", occurrence: int = 1) -> int:
    process = await forks.start(trial, at, occurrence)
    async with asyncio.timeout(DEADLINE_S):
        return await process.ended


def final_weights(trial: Stage, term: int) -> dict[str, np.ndarray]:
    return load_file(trial.config.paths.checkpoints / f"v{term}.{STEPS}" / "model.safetensors")


@pytest.mark.parametrize(("point", "occurrence"), POINTS)
async def test_a_killed_run_ends_with_the_weights_of_the_uninterrupted_one(
    forks: Zygote,
    uninterrupted: tuple[dict[str, np.ndarray], list[str]],
    tmp_path: Path,
    point: str,
    occurrence: int,
) -> None:
    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        assert await run(forks, trial, point, occurrence) == -9
        before = await trial.names.get_version()
        num_published = before.version.step if before else -1
        assert await run(forks, trial) == 0
        seen = trial.controller
        weights, consumed = uninterrupted
        after = await trial.names.get_version()
    assert after is not None
    assert after.version == PolicyVersion(2, STEPS)
    found = final_weights(trial, term=2)
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    assert seen.consumed == consumed
    assert len(set(consumed)) == STEPS * BATCH
    republished = [PolicyVersion.parse(path.name).step for path in trial.config.paths.weights.glob("v2.*")]
    assert min(republished) >= num_published
    assert not list(trial.config.paths.recover.glob(".v*"))


async def test_a_run_that_is_killed_again_and_again_still_ends_there(
    forks: Zygote, uninterrupted: tuple[dict[str, np.ndarray], list[str]], tmp_path: Path
) -> None:
    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        for point, occurrence in [
            ("end publish", 3),
            ("end update", 2),
            ("mark checkpoint named", 1),
            ("end commit", 1),
        ]:
            assert await run(forks, trial, point, occurrence) == -9
        assert await run(forks, trial) == 0
        weights, consumed = uninterrupted
    found = final_weights(trial, term=5)
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    assert trial.controller.consumed == consumed


async def test_where_the_controller_lost_its_journal_the_run_goes_on_from_the_checkpoint(
    forks: Zygote, tmp_path: Path
) -> None:
    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        assert await run(forks, trial, "end publish", 4) == -9
        lost = trial.controller
        lost.tasks, lost.pending, lost.batches, lost.consumed, lost.committed = {}, {}, {}, [], set()
        assert await run(forks, trial) == 0
        record = await trial.names.get_version()
    assert record is not None
    assert record.version == PolicyVersion(2, STEPS)
    assert [begin[1:] for begin in lost.begins] == [(0, True), (2, False), (2, True)]
    assert sorted(path.name for path in trial.config.paths.weights.glob("v2.*"))[0] == "v2.2"
    assert len(lost.consumed) == (STEPS - 2) * BATCH


async def test_a_finished_run_stays_finished(forks: Zygote, tmp_path: Path) -> None:
    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        assert await run(forks, trial) == 0
        num_commits = len(trial.controller.commits)
        assert await run(forks, trial) == 0
        assert len(trial.controller.commits) == num_commits
