"""`python -m services.trainer` ends cleanly when asked to, whatever it does, and says a user's mistake in one line."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trainer_harness import ROOT, Stage, stage

CLEAN_END_S = 10.0


@asynccontextmanager
async def process(trial: Stage) -> AsyncIterator[Process]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    options = [f"--config={trial.config_file}", f"--name-resolve={trial.name_resolve}"]
    command = [sys.executable, "-m", "services.trainer", *options]
    started = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def until_logged(started: Process, text: str) -> None:
    assert started.stderr is not None
    async with asyncio.timeout(60):
        async for line in started.stderr:
            if text in line.decode():
                return


@pytest.mark.parametrize("when", ["warm start", "waiting"])
async def test_sigterm_ends_it_within_ten_seconds(tmp_path: Path, when: str) -> None:
    warm = {"warm_start": {"steps": 20_000, "batch_size": 64, "lr": 1e-3}} if when == "warm start" else {}
    async with stage(tmp_path, steps=9, **warm) as trial:
        await trial.controller.open(False)
        async with process(trial) as started:
            await until_logged(started, "leads in term 1")
            if when == "waiting":
                await trial.controller.until(lambda seen: len(seen.pending) > 0)
            started.send_signal(signal.SIGTERM)
            async with asyncio.timeout(CLEAN_END_S):
                assert await started.wait() == 0
        assert not list(trial.config.paths.weights.glob(".static*"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"actor": {"path": "/nowhere/model"}, "tokenizer_path": "configs/models/sort_digits"}, "/nowhere/model"),
        ({"tokenizer_path": "/nowhere/tokenizer"}, "/nowhere/tokenizer"),
        ({"train_dataset": {"path": "/nowhere/rows.jsonl"}}, "/nowhere/rows.jsonl"),
        ({"actor": {"mb_spec": {"max_tokens_per_mb": 16}}}, "max_tokens_per_mb"),
    ],
)
async def test_a_mistake_ends_it_with_one_line_that_names_it(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    async with stage(tmp_path, **changes) as trial, process(trial) as started:
        async with asyncio.timeout(60):
            _, errors = await started.communicate()
        assert started.returncode == 2
        text = errors.decode()
        assert "Traceback" not in text
        assert named in text.strip().splitlines()[-1]
