"""How long a run is, and when something is due. The experiment file decides, never a checkpoint.

Pure: time is an argument.
"""

from dataclasses import dataclass

from headway.config import ExperimentConfig
from headway.config.dataset import Frequency
from headway.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class RunLength:
    """The limits of a run, in steps."""

    total_steps: int
    batch_size: int
    """Groups of a step."""
    tasks_per_epoch: int

    @classmethod
    def of(cls, config: ExperimentConfig, tasks_per_epoch: int) -> "RunLength":
        """The earliest of the file's limits.

        Raises:
            InvalidInput: It leaves no step.
        """
        batch_size = config.rollout.consumer_batch_size
        limits = {"total_train_epochs": config.total_train_epochs * tasks_per_epoch // batch_size}
        if config.total_train_steps is not None:
            limits["total_train_steps"] = config.total_train_steps
        if config.total_train_n_seqs is not None:
            limits["total_train_n_seqs"] = -(-config.total_train_n_seqs // (batch_size * config.gconfig.n_samples))
        key = min(limits, key=lambda name: limits[name])
        if limits[key] < 1:
            raise InvalidInput(f"{key} leaves no train step: {tasks_per_epoch} tasks an epoch, batches of {batch_size}")
        return cls(limits[key], batch_size, tasks_per_epoch)

    def epochs_at(self, step: int) -> int:
        """Whole epochs after `step` completed steps.

        Example:
            >>> RunLength(10, batch_size=8, tasks_per_epoch=20).epochs_at(5)
            2
        """
        return step * self.batch_size // self.tasks_per_epoch


class Due:
    """One action's frequency: due when any of its three clocks is.

    Args:
        frequency: `freq_epochs`, `freq_steps`, `freq_secs`; those that are null never make it due.
        length: Says when an epoch ends.
        now: Monotonic seconds; the clock of `freq_secs` starts here.

    Example:
        >>> due = Due(Frequency(freq_steps=2, freq_secs=100), RunLength(9, 8, 80), now=0.0)
        >>> [due.is_due(1, now=10.0), due.is_due(2, now=20.0), due.is_due(3, now=130.0), due.is_due(5, now=140.0)]
        [False, True, True, False]
    """

    def __init__(self, frequency: Frequency, length: RunLength, now: float) -> None:
        self._frequency = frequency
        self._length = length
        self._last = now

    def is_due(self, step: int, now: float) -> bool:
        """Whether to act after `step` completed steps; acting restarts the clock of `freq_secs`."""
        due = self._by_steps(step) or self._by_epochs(step) or self._by_seconds(now)
        if due:
            self._last = now
        return due

    def _by_steps(self, step: int) -> bool:
        every = self._frequency.freq_steps
        return every is not None and step % every == 0

    def _by_epochs(self, step: int) -> bool:
        every, epochs = self._frequency.freq_epochs, self._length.epochs_at(step)
        return every is not None and epochs > self._length.epochs_at(step - 1) and epochs % every == 0

    def _by_seconds(self, now: float) -> bool:
        return self._frequency.freq_secs is not None and now - self._last >= self._frequency.freq_secs
