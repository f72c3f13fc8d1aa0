"""From items to results: choose the functions, answer what is known already, give the rest to the pool, add up sums."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from headway.errors import Overloaded
from headway.runtime.metrics import Latency
from headway.v1 import reward_pb2 as pb
from services.reward.inline import InlineJudge
from services.reward.memory import Account, AnswerCache, Strikes, item_key
from services.reward.plan import Plan
from services.reward.pool import Pool
from services.reward.queues import Job

Report = Callable[[pb.ScoreResult], None]
CACHED = (pb.SCORE_STATUS_OK, pb.SCORE_STATUS_INVALID_OUTPUT, pb.SCORE_STATUS_ABSTAIN)


class Scoring:
    """Everything of the service but its wire."""

    def __init__(self, pool: Pool, plan: Plan, timeout_s: float) -> None:
        self._pool = pool
        self._judge = InlineJudge(plan.judge, pool.settings.max_queued) if plan.judge is not None else None
        self._plan = plan
        self._timeout_s = timeout_s
        self._cache = AnswerCache()
        self._strikes = Strikes()
        self._account = Account()
        self.latency = Latency()
        """Time of items in a worker, by function."""

    def score(self, items: Iterable[pb.ScoreItem], report: Report) -> list[Job]:
        """Score each item; `report` is called exactly once for each, now or later. Returns what is not answered yet.

        Raises:
            InvalidInput: An item cannot be scored at all; nothing was started.
            Overloaded: The queue is full; nothing was started.
        """
        jobs: list[Job] = []
        answered: list[tuple[Job, pb.ScoreResult]] = []
        for index, item in enumerate(items):
            weights = self._plan.for_item(item)
            done = self._job_done(index, report) if _is_plain(weights) else self._sum_done(index, weights, report)
            for function in weights:
                job = self._job(function, item, done)
                known = self._known(job)
                if known is None:
                    jobs.append(job)
                else:
                    answered.append((job, known))
        self._submit(jobs)
        for job, result in answered:
            job.done(job, result)
        return jobs

    def abandon(self, jobs: list[Job]) -> None:
        """Nobody waits for these any more; those that are answered already are left alone."""
        self._pool.abandon(jobs)
        if self._judge is not None:
            self._judge.abandon(jobs)

    def _submit(self, jobs: list[Job]) -> None:
        """Start all of them, or none."""
        judged = [job for job in jobs if job.function == "judge"]
        try:
            if self._judge is not None:
                self._judge.check_room(len(judged))
            self._pool.submit([job for job in jobs if job.function != "judge"])
        except Overloaded:
            self._account.num_shed += len(jobs)
            raise
        if self._judge is not None:
            self._judge.submit(judged)

    async def drain(self, limit_s: float) -> None:
        """Take no more items, and wait until the ones taken are answered, at most `limit_s`."""
        waits = [self._pool.drain(limit_s)]
        if self._judge is not None:
            waits.append(self._judge.drain(limit_s))
        await asyncio.gather(*waits)

    async def aclose(self) -> None:
        if self._judge is not None:
            await self._judge.close()

    def _job(self, function: str, item: pb.ScoreItem, done: Callable[[Job, pb.ScoreResult], None]) -> Job:
        limit_s = min(item.timeout_s, self._timeout_s) if item.timeout_s > 0 else self._timeout_s
        return Job(function, item.item_id, item.SerializeToString(), limit_s, done, item_key(function, item))

    def _known(self, job: Job) -> pb.ScoreResult | None:
        """The result of an item that need not be run."""
        if self._strikes.is_quarantined(job.key):
            return pb.ScoreResult(
                item_id=job.item_id, status=pb.SCORE_STATUS_ERROR, message="quarantined: this item killed three workers"
            )
        cached = self._cache.get(job.key)
        if cached is None:
            return None
        result = pb.ScoreResult()
        result.CopyFrom(cached)
        result.item_id, result.worker, result.is_cached = job.item_id, 0, True
        return result

    def _finished(self, job: Job, result: pb.ScoreResult) -> None:
        self._account.add(job.function, result)
        if not result.is_cached:
            self.latency.add(job.function, result.elapsed_s)
        if job.killed_its_worker:
            self._strikes.add(job.key, job.item_id)
        if not result.is_cached and result.status in CACHED and self._pool.functions[job.function]["is_pure"]:
            self._cache.put(job.key, result)

    def _job_done(self, index: int, report: Report) -> Callable[[Job, pb.ScoreResult], None]:
        def done(job: Job, result: pb.ScoreResult) -> None:
            self._finished(job, result)
            result.index = index
            report(result)

        return done

    def _sum_done(
        self, index: int, weights: Mapping[str, float], report: Report
    ) -> Callable[[Job, pb.ScoreResult], None]:
        parts: dict[str, pb.ScoreResult] = {}

        def done(job: Job, result: pb.ScoreResult) -> None:
            self._finished(job, result)
            parts[job.function] = result
            if len(parts) == len(weights):
                total = weighted_sum(weights, parts)
                total.index = index
                report(total)

        return done

    def functions(self) -> list[pb.FunctionInfo]:
        return [
            pb.FunctionInfo(name=name, summary=known["summary"], is_pure=known["is_pure"])
            for name, known in sorted(self._pool.functions.items())
        ]

    def status(self) -> pb.RewardStatus:
        return pb.RewardStatus(
            num_workers=self._pool.settings.num_workers,
            num_queued=self._pool.num_queued,
            num_running=self._pool.crew.num_open + (self._judge.num_open if self._judge is not None else 0),
            num_by_status=self._account.num_by_status,
            num_workers_replaced=self._pool.crew.num_replaced,
            slowest=self._account.slowest(),
            quarantined=self._strikes.quarantined(),
            num_slow=len(self._pool.crew.aside),
            num_cached=self._account.num_cached,
            num_shed=self._account.num_shed,
            isolation=self._pool.layers,
            missing_isolation=self._pool.missing_layers,
        )


def _is_plain(weights: Mapping[str, float]) -> bool:
    return len(weights) == 1 and next(iter(weights.values())) == 1.0


def weighted_sum(weights: Mapping[str, float], parts: Mapping[str, pb.ScoreResult]) -> pb.ScoreResult:
    """One result out of the parts: their weighted sum, or the first failure with its part's name.

    A part that abstains or fails makes no sum: a reward with a part missing would be a wrong reward.
    """
    first = next(iter(parts.values()))
    total = pb.ScoreResult(
        item_id=first.item_id,
        status=pb.SCORE_STATUS_OK,
        elapsed_s=sum(part.elapsed_s for part in parts.values()),
        worker=max(part.worker for part in parts.values()),
        is_cached=all(part.is_cached for part in parts.values()),
    )
    for function, weight in weights.items():
        part = parts[function]
        if part.status != pb.SCORE_STATUS_OK:
            total.status, total.reward, total.message = part.status, 0.0, f"{function}: {part.message}"
            return total
        total.parts[function] = part.reward
        total.reward += weight * part.reward
    return total
