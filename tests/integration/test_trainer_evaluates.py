"""Held-out evaluations run beside training, each of one version; who asks for one gets it, and no result is lost."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from trainer_harness import Stage, stage

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.grpc_client import connect, translating
from headway.testing.scripted_controller import ScriptedController
from headway.v1 import rollout_controller_pb2 as pb_controller
from headway.v1 import trainer_pb2 as pb
from headway.v1.trainer_pb2_grpc import TrainerStub
from services.trainer import app

VALID = {
    "valid_dataset": {"path": "python:examples.sort_digits.rows", "split": "test", "max_rows": 6},
    "evaluator": {"at_start": True, "at_end": False},
}


class SlowToEvaluate(ScriptedController):
    """Holds evaluations back until they are let go."""

    is_let_go = False

    async def Evaluate(self, requests: Any, context: Any) -> AsyncIterator[pb_controller.EvaluateReply]:
        async with self.changed:
            await self.changed.wait_for(lambda: self.is_let_go)
        async for reply in super().Evaluate(requests, context):
            yield reply

    async def let_go(self) -> None:
        async with self.changed:
            self.is_let_go = True
            self.changed.notify_all()


async def published(trial: Stage) -> PolicyVersion:
    record = await trial.names.get_version()
    assert record is not None
    return record.version


def lines(trial: Stage) -> list[Any]:
    return [orjson.loads(line) for line in (trial.config.paths.logs / "stats.jsonl").read_bytes().splitlines()]


async def test_a_step_trains_while_its_version_is_evaluated_and_publishes_when_that_has_ended(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=2, make=SlowToEvaluate, **VALID) as trial:
        seen = trial.controller
        assert isinstance(seen, SlowToEvaluate)
        async with app.run(trial.config, trial.placement()) as running:
            await seen.until(lambda controller: ("fetch", 1) in controller.calls)  # step 0 has trained
            assert (await published(trial), seen.evaluations) == (PolicyVersion(1, 0), [])
            await seen.let_go()
            await running.supervisor.wait()
        assert seen.evaluations == [(PolicyVersion(1, 0), 6)]
        assert await published(trial) == PolicyVersion(1, 2)
        assert [(line["step"], "eval/task_reward/avg" in line) for line in lines(trial)] == [
            (0, True),
            (1, False),
            (2, False),
        ]


async def test_people_get_one_evaluation_of_the_published_version_and_see_the_phases(tmp_path: Path) -> None:
    changes = VALID | {"evaluator": {"at_start": False, "at_end": False}}
    async with stage(tmp_path, steps=1, make=SlowToEvaluate, **changes) as trial:
        seen = trial.controller
        assert isinstance(seen, SlowToEvaluate)
        await seen.open(False)
        async with app.run(trial.config, trial.placement()) as running:
            await seen.until(lambda controller: bool(controller.tasks))
            async with connect(f"127.0.0.1:{running.ports['grpc']}") as channel:
                stub = TrainerStub(channel)
                replies = [await stub.StartEvaluation(pb.StartEvaluationRequest()) for _ in range(2)]
                assert [(reply.version.term, reply.version.step) for reply in replies] == [(1, 0)] * 2
                status = await stub.GetStatus(pb.GetStatusRequest())
                assert status.evaluating.term == 1
                assert status.phases[-1].name == "wait_for_batch"
                assert status.phases[-1].is_running
                assert "write" in {span.name for span in status.phases}
                last = status.phases[-2]
                later = await stub.GetStatus(pb.GetStatusRequest(after_phase=last.number))
                assert [span.number for span in later.phases][:1] == [last.number + 1]
            await seen.let_go()
            await seen.open(True)
            await running.supervisor.wait()
        assert seen.evaluations == [(PolicyVersion(1, 0), 6)]


async def test_without_held_out_tasks_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=1) as trial:
        await trial.controller.open(False)
        async with app.run(trial.config, trial.placement()) as running:
            await trial.controller.until(lambda controller: bool(controller.tasks))
            async with connect(f"127.0.0.1:{running.ports['grpc']}") as channel:
                with pytest.raises(InvalidInput, match="valid_dataset"), translating("evaluate"):
                    await TrainerStub(channel).StartEvaluation(pb.StartEvaluationRequest())
            await trial.controller.open(True)
            await running.supervisor.wait()


async def test_an_evaluation_that_a_checkpoint_interrupts_is_made_anew(tmp_path: Path) -> None:
    changes = VALID | {"recover": {"mode": "auto", "freq_steps": 1}}
    async with stage(tmp_path, steps=1, make=SlowToEvaluate, **changes) as trial:
        seen = trial.controller
        assert isinstance(seen, SlowToEvaluate)
        await seen.open(False)
        async with app.run(trial.config, trial.placement()):
            while not (trial.config.paths.recover / "latest").exists():  # noqa: ASYNC110 - seen on the disk alone
                await asyncio.sleep(0.01)
        assert seen.evaluations == []
        await seen.let_go()
        await seen.open(True)
        async with app.run(trial.config, trial.placement("1")) as running:
            await running.supervisor.wait()
        assert [version.step for version, _ in seen.evaluations] == [0]
        assert [(line["step"], "eval/task_reward/avg" in line) for line in lines(trial)] == [(0, True), (1, False)]
