"""Which items a free worker gets next: oldest first, and as many at once as take a few milliseconds together.

Sending items one at a time would cost more than running them; sending many slow ones to one worker would leave the
others idle. So a chunk holds what is expected to take CHUNK_S, and never more than a fair share of what waits.

Pure: no clock, no I/O.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headway.v1 import reward_pb2 as pb

CHUNK_S = 0.02
TINY_CHUNK_S = 0.0005
MAX_CHUNK = 64
SMOOTHING = 0.05
SHARE_ABOVE = 0.02
"""How many of the items may need more CPU than is called usual."""
QUANTILE_STEP = 0.1
USUAL_TIMES_TYPICAL = 5.0
LEAST_USUAL_S = 0.004


@dataclass(slots=True, eq=False)
class Job:
    """One item that waits for a result."""

    function: str
    item_id: str
    packed: bytes
    """The ScoreItem, serialised."""
    limit_s: float
    done: Callable[["Job", pb.ScoreResult], None]
    """Called exactly once, with the result."""
    key: bytes = b""
    """Digest of everything that the result depends on."""
    killed_its_worker: bool = False
    is_abandoned: bool = False
    """Nobody waits for the result any more."""
    is_suspect: bool = False
    """Was running when the fork server died."""
    order: int = 0


@dataclass(slots=True)
class Queue:
    """The waiting items of one function."""

    typical_s: float
    seal: str = ""
    """What a worker must have settled for to run these."""
    jobs: deque[Job] = field(default_factory=deque)
    _usual_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._usual_cpu_s = USUAL_TIMES_TYPICAL * self.typical_s

    def measured(self, elapsed_s: float, cpu_s: float | None) -> None:
        """Learn from an item that ended by itself; without `cpu_s` where that says nothing about the next ones."""
        self.typical_s += SMOOTHING * (elapsed_s - self.typical_s)
        if cpu_s is not None:
            step = 1 if cpu_s > self._usual_cpu_s else -SHARE_ABOVE / (1 - SHARE_ABOVE)
            self._usual_cpu_s *= 1 + QUANTILE_STEP * step

    @property
    def usual_cpu_s(self) -> float:
        """CPU seconds that all but a few of the items need."""
        return max(self._usual_cpu_s, LEAST_USUAL_S)

    def chunk_size(self, num_workers: int) -> int:
        """How many items to send at once, when `num_workers` share the queue."""
        fair = -(-len(self.jobs) // num_workers)
        typical_s = max(self.typical_s, 1e-6)
        most = int(CHUNK_S / typical_s)
        tiny = int(TINY_CHUNK_S / typical_s)
        return max(1, min(most, max(fair, tiny), MAX_CHUNK, len(self.jobs)))


class Queues:
    """All waiting items, a queue for each function."""

    def __init__(self, queues: dict[str, Queue], num_workers: int) -> None:
        self._queues = queues
        self._num_workers = num_workers
        self._num_pushed = 0
        self.num_waiting = 0

    def __getitem__(self, function: str) -> Queue:
        return self._queues[function]

    def __contains__(self, function: object) -> bool:
        return function in self._queues

    def push(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._num_pushed += 1
            job.order = self._num_pushed
            self._queues[job.function].jobs.append(job)
            self.num_waiting += 1

    def push_back(self, jobs: Iterable[Job]) -> None:
        """Put items at the front again, in their old order: their worker was lost to another item."""
        for job in reversed(list(jobs)):
            self._queues[job.function].jobs.appendleft(job)
            self.num_waiting += 1

    def next_function(self) -> str | None:
        """The function whose oldest item has waited longest; None: nothing waits."""
        waiting = [(queue.jobs[0].order, name) for name, queue in self._queues.items() if queue.jobs]
        return min(waiting)[1] if waiting else None

    def take(self, function: str) -> list[Job]:
        """The next chunk of this function's items."""
        queue = self._queues[function]
        jobs = [queue.jobs.popleft() for _ in range(queue.chunk_size(self._num_workers))]
        self.num_waiting -= len(jobs)
        return jobs

    def remove_abandoned(self) -> int:
        """Take out what nobody waits for; how many they were."""
        before = self.num_waiting
        for queue in self._queues.values():
            queue.jobs = deque(job for job in queue.jobs if not job.is_abandoned)
        self.num_waiting = sum(len(queue.jobs) for queue in self._queues.values())
        return before - self.num_waiting

    def drain(self) -> list[Job]:
        """Take everything out."""
        jobs = [job for queue in self._queues.values() for job in queue.jobs]
        for queue in self._queues.values():
            queue.jobs.clear()
        self.num_waiting = 0
        return jobs
