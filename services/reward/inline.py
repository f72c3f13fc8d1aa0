"""Run the judge in the service's own loop: it only waits, its rate is the whole service's, and nothing foreign runs."""

import asyncio
import time
from collections.abc import Callable, Sequence

import orjson

from headway.errors import Overloaded
from headway.reward.binding import Sample
from headway.reward.evaluate import Evaluator
from headway.reward.judge import Judge, JudgeSettings
from headway.reward.outcome import Outcome, ScoreStatus
from headway.v1 import reward_pb2 as pb
from services.reward.queues import Job
from services.reward.wire import STATUS_TO_WIRE

Done = Callable[[Job, pb.ScoreResult], None]


class InlineJudge:
    """Answers the items of the function `judge`."""

    def __init__(self, settings: JudgeSettings, max_open: int) -> None:
        self._judge = Judge(settings)
        self._evaluator = Evaluator("judge", {"endpoint": self._judge}, in_loop=True)
        self._max_open = max_open
        self._tasks: dict[asyncio.Task[None], Job] = {}

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def check_room(self, count: int) -> None:
        """
        Raises:
            Overloaded: So many more items would be too many.
        """
        if count and len(self._tasks) + count > self._max_open:
            raise Overloaded(f"{len(self._tasks)} items wait for the judge; {count} more exceed max_queued")

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            task = asyncio.get_running_loop().create_task(self._run(job), name=f"judge {job.item_id}")
            self._tasks[task] = job
            task.add_done_callback(self._tasks.pop)

    def abandon(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more."""
        unwanted = set(map(id, jobs))
        for task, job in self._tasks.items():
            if id(job) in unwanted:
                task.cancel()

    async def _run(self, job: Job) -> None:
        item = pb.ScoreItem.FromString(job.packed)
        sample = Sample(item.completion, item.prompt, orjson.loads(item.data_json or b"{}"))
        async with self._judge.turn():
            started = time.monotonic()
            try:
                async with asyncio.timeout(job.limit_s):
                    outcome = await self._evaluator.run_async(sample)
            except TimeoutError:
                outcome = Outcome(ScoreStatus.TIMEOUT, message=f"the judge took longer than {job.limit_s:g} s")
        job.done(
            job,
            pb.ScoreResult(
                item_id=job.item_id,
                status=STATUS_TO_WIRE[outcome.status],
                reward=outcome.reward,
                message=outcome.message,
                elapsed_s=time.monotonic() - started,
            ),
        )

    async def drain(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._judge.close()
