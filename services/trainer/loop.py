"""The training loop: batches in, versions out.

    start:  fresh: warm start -> publish v{term}.0 -> evaluate        recovered: checkpoint c -> replay
    step s: wait for batch s -> log-probs, advantages, update -> write, publish v{term}.{s+1} -> evaluate when due
            -> commit s -> log -> checkpoint (written beside what comes next), export when due
    end:    export -> finished

Step s consumes batch s with version (term, s) and makes (term, s + 1). Batch s + 1 is asked for after the update and
arrives while the weights are written: composed earlier, it would wait for a whole step while its tokens age.

An evaluation runs beside training, and the next version is published when it has ended; see `evaluation.py`. The
statistics of its step are written with its result; a checkpoint meanwhile carries them, and who continues from it
evaluates anew.

Skipped steps. A loss or gradient that is not finite changes nothing. The step is committed with the version that it
started from: its groups are consumed, and the same step begins again with a new batch, so the step number goes on
counting updates and no token's staleness changes. A skipped batch is never replayed. Five in a row end the run.

Replay. A recovered trainer starts at the step c of its checkpoint; version p was published when its predecessor died.
Steps before p train on the batches that the controller handed out then, and publish nothing; p is published again under
the new term, and training goes on. Where the controller has lost those batches, the checkpoint's version is published
instead, and training goes on from there.

Waits for the batch, the torch thread, name-resolve and the controller, each by a name that the status shows.
"""

import asyncio
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError
from services.trainer.actions import Actions, Parts, Progress
from services.trainer.batches import BatchSource, HistoryLost, StepBatch
from services.trainer.checkpoint import Checkpoint
from services.trainer.evaluation import Evaluation
from services.trainer.phases import Phase
from services.trainer.schedule import Due
from services.trainer.start import Start
from services.trainer.statistics import Stats, batch_stats, timing_stats
from services.trainer.tasks import Need, TaskFeeder

MAX_SKIPPED_IN_A_ROW = 5
log = logging.getLogger(__name__)


class TrainLoop:
    """Runs once, from the start that it is given to the end of the run."""

    def __init__(self, parts: Parts, start: Start) -> None:
        self._parts = parts
        self._start = start
        self._config = parts.config
        self._phases = parts.phases
        self.progress = Progress(
            PolicyVersion(parts.term, start.checkpoint.record.version.step if start.checkpoint else 0),
            start.published_step,
        )
        self._evaluation = Evaluation(parts)
        self._actions = Actions(parts, self.progress, self._evaluation.publishing)
        self.feeder = TaskFeeder(parts.dataset, parts.controller, self._need)
        self._batches = BatchSource(parts.config, parts.controller, start.published_step)
        now = time.monotonic()
        self._evaluator = Due(parts.config.evaluator, parts.length, now)
        self._recover = Due(parts.config.recover, parts.length, now)
        self._saver = Due(parts.config.saver, parts.length, now)
        self._wake = asyncio.Event()
        self._feeding: asyncio.Task[Any] | None = None

    @property
    def total_steps(self) -> int:
        return self._parts.length.total_steps

    @property
    def is_recoverable(self) -> bool:
        return self._config.recover.mode != "disabled"

    async def run(self) -> None:
        """Train to the end of the run, or until `stop`.

        Raises:
            HeadwayError: The run cannot go on; the message says why.
        """
        try:
            await self._begin()
            while self.progress.version.step < self.total_steps and self.progress.stop_reason is None:
                await self._step()
            await self._end()
        finally:
            if self._parts.trace is not None:
                self._parts.trace.flush()
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.wait({self._feeding})
            await self._evaluation.close()
            await self._batches.close()
            for save in self.progress.saves:
                save.cancel()

    async def save(self) -> Path:
        """Write a checkpoint at the end of the running step; returns its folder."""
        saved: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self.progress.saves.append(saved)
        self._wake.set()
        return await saved

    async def evaluate(self) -> PolicyVersion:
        """Begin a held-out evaluation of the published version, beside training; returns the version.

        Raises:
            InvalidInput: There are no held-out tasks.
            Unavailable: Nothing is published yet.
        """
        return await self._evaluation.request()

    @property
    def evaluating(self) -> PolicyVersion | None:
        """The version that is evaluated now."""
        return self._evaluation.running

    def stop(self, reason: str) -> None:
        """End after the running step, with a checkpoint where recovery is on."""
        self.progress.stop_reason = reason
        self._wake.set()

    # ---- start and end

    async def _begin(self) -> None:
        parts, start = self._parts, self._start
        step = self.progress.version.step
        with self._phases(Phase.STARTING):
            await parts.ranks.call("open_weights", parts.term)
            await parts.controller.begin(step, start.is_fresh)
            if start.checkpoint is not None:
                await self._restore(start.checkpoint)
        if start.checkpoint is None and parts.warm_start is not None:
            with self._phases(Phase.WARM_START):
                stats = await parts.ranks.call("warm_start", parts.warm_start)
            log.info("warm start: %s", stats)
        if step >= start.published_step:
            await self._actions.publish(self.progress.version)
        self._feeding = parts.start_task("task feeder", self.feeder.run())
        self._phases.take_seconds()
        if start.checkpoint is None:
            await self._after_start()
        elif (unlogged := start.checkpoint.record.unlogged) is not None and step >= start.published_step:
            self._log(unlogged, is_evaluated=True)

    async def _restore(self, checkpoint: Checkpoint) -> None:
        record = checkpoint.record
        log.info("continues from checkpoint %s, published is step %d", checkpoint.path, self._start.published_step)
        await self._parts.ranks.call("restore", checkpoint.path, record.version.step)
        self.feeder.restore(record.tasks)
        self.progress.parent = record.version
        self.progress.checkpointed = self.progress.version if record.version.step == self.total_steps else None
        self.progress.num_skipped = record.num_skipped_steps
        self.progress.num_samples = record.num_samples
        self.progress.trained_s = record.trained_s

    async def _after_start(self) -> None:
        """A run that begins at step 0: held-out accuracy of the initial model, and a first checkpoint."""
        is_published = self._start.published_step <= 0
        if self._config.evaluator.at_start and is_published and self._parts.evaluation_tasks:
            self._log({}, is_evaluated=True)
        if self.is_recoverable:
            await self._actions.checkpoint(self.feeder.state())

    async def _end(self) -> None:
        reason = self.progress.stop_reason
        if reason is not None:
            log.info("stops at step %d: %s", self.progress.version.step, reason)
        await self._evaluation.ended()
        if self.is_recoverable and self.progress.checkpointed != self.progress.version:
            await self._actions.checkpoint(self.feeder.state())
        if reason is None:
            await self._actions.export()
        await self._answer_saves()
        await self._actions.checkpoint_written()
        if reason is None and self.is_recoverable:
            self._parts.checkpoints.mark_finished(True)
        self._phases.stay_in(Phase.FINISHED)

    def _is_evaluation_due(self, step: int) -> bool:
        if not self._parts.evaluation_tasks:
            return False
        is_due = self._evaluator.is_due(step, time.monotonic())
        return is_due or (step == self.total_steps and self._config.evaluator.at_end)

    # ---- one step

    async def _step(self) -> None:
        step = self.progress.version.step
        self._phases.mark(f"step {step}")
        started = time.monotonic()
        batch = await self._next_batch(step)
        if batch is None:
            return
        self.feeder.consume(batch.task_ids)
        self.progress.is_consuming = True
        self.feeder.refresh()
        result = await self._parts.ranks.call("train", batch.samples, step)
        if result.is_applied:
            await self._advance(batch, result.stats, started)
        else:
            await self._skip(batch)
        await self._answer_saves()
        if self._parts.trace is not None:
            self._parts.trace.end_of_step()

    async def _next_batch(self, step: int) -> StepBatch | None:
        """The batch of a step; None: look again. Saves that are asked for meanwhile are made."""
        fetch = self._batches.prefetch(step)
        self.feeder.refresh()
        with self._phases(Phase.WAIT_FOR_BATCH):
            while not fetch.done():
                woken = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({fetch, woken}, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                self._wake.clear()
                if self.progress.stop_reason is not None:
                    return None
                await self._answer_saves()
        try:
            return fetch.result()
        except HistoryLost as lost:
            await self._go_on_without_history(lost)
            return None

    async def _advance(self, batch: StepBatch, update: Stats, started: float) -> None:
        progress = self.progress
        before = progress.version
        version = PolicyVersion(before.term, before.step + 1)
        is_caught_up = version.step >= progress.published_step
        progress.version = version
        progress.is_consuming = False
        progress.num_samples += batch.samples.num_samples
        progress.num_skipped_in_a_row = 0
        if version.step < self.total_steps:
            self._batches.prefetch(version.step)
        if is_caught_up:
            await self._actions.publish(version)
        stats = self._stats_of(batch, update)
        progress.trained_s += time.monotonic() - started
        stats |= timing_stats(self._phases.take_seconds(), batch.samples.num_samples, batch.samples.num_tokens)
        await self._actions.commit(before.step, stats)
        self._batches.forget(before.step)
        with self._phases(Phase.LOG):
            self._log(stats, is_evaluated=is_caught_up and self._is_evaluation_due(version.step))
        now = time.monotonic()
        if self.is_recoverable and self._recover.is_due(version.step, now):
            await self._actions.checkpoint(self.feeder.state())
        if self._saver.is_due(version.step, now) and is_caught_up and version.step < self.total_steps:
            await self._actions.export()

    def _log(self, stats: Stats, is_evaluated: bool) -> None:
        """Write the statistics of the version in hand; where it is to be evaluated, when that has ended."""
        if not is_evaluated:
            self._parts.statistics.write(self.progress.version.step, self.progress.version, stats)
            return
        self.progress.unlogged = stats
        self._evaluation.begin().add_done_callback(partial(self._log_evaluated, self.progress.version))

    def _log_evaluated(self, version: PolicyVersion, evaluation: "asyncio.Task[Stats]") -> None:
        stats, self.progress.unlogged = self.progress.unlogged, None
        if stats is not None and not evaluation.cancelled() and evaluation.exception() is None:
            self._parts.statistics.write(version.step, version, stats | evaluation.result())

    async def _skip(self, batch: StepBatch) -> None:
        """Nothing was changed: consume the batch without making a version."""
        progress = self.progress
        step = progress.version.step
        progress.is_consuming = False
        progress.num_skipped += 1
        progress.num_skipped_in_a_row += 1
        log.warning("step %d is skipped: no finite loss and gradient (tasks %s)", step, ", ".join(batch.task_ids))
        self._batches.forget(step)
        await self._actions.commit(step, {"num_skipped_steps": float(progress.num_skipped)})
        if progress.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise HeadwayError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row, at step {step}, had no finite loss and gradient; "
                f"the last finite weights are {progress.version.label}"
            )

    def _stats_of(self, batch: StepBatch, update: Stats) -> Stats:
        stats = batch_stats(batch.fetched, batch.fetched.eta) | update
        stats["rollout/invalid_tokens"] = float(batch.samples.num_invalid_tokens)
        stats["num_skipped_steps"] = float(self.progress.num_skipped)
        stats["epoch"] = float(self._parts.length.epochs_at(self.progress.version.step))
        stats["total_steps"] = float(self.total_steps)
        stats["total_samples"] = float(self.progress.num_samples)
        stats["total_s"] = self.progress.trained_s
        return stats

    async def _go_on_without_history(self, lost: HistoryLost) -> None:
        """Steps since the checkpoint cannot be repeated: publish the checkpoint's version, and go on from it."""
        version = self.progress.version
        log.warning("%s: goes on from %s, which is published anew", lost, version.label)
        self._batches.forget_all()
        self._batches.replay_until = self.progress.published_step = version.step
        await self._parts.controller.begin(version.step, is_fresh=True)
        await self._actions.publish(version)
        self.feeder.resubmit()

    async def _answer_saves(self) -> None:
        saves, self.progress.saves = self.progress.saves, []
        if saves:
            writing = await self._actions.checkpoint(self.feeder.state())
            writing.add_done_callback(partial(_answer, saves))

    def _need(self) -> Need:
        """Enough tasks that eta + 2 batches are under way, and no more than the run still needs."""
        step = self.progress.version.step
        batch_size = self._parts.length.batch_size
        first = max(step, self.progress.published_step)
        num_arrived = sum(self._batches.has(step) for step in (first, first + 1))
        num_left = max(0, self.total_steps - first - num_arrived)
        eta = self._config.rollout.max_head_offpolicyness if self.feeder.eta is None else self.feeder.eta
        num_ahead = eta + 2
        num_unconsumed = self.total_steps - step - self.progress.is_consuming
        return Need(min(num_ahead, num_left) * batch_size, num_unconsumed * batch_size)


def _answer(saves: "list[asyncio.Future[Path]]", writing: "asyncio.Task[Path]") -> None:
    """Hand a checkpoint that is complete to those who asked for one."""
    for save in saves:
        if writing.cancelled():
            save.cancel()
        elif not save.done() and (error := writing.exception()) is not None:
            save.set_exception(error)
        elif not save.done():
            save.set_result(writing.result())
