"""What the service remembers of items: answers, killers, slow ones. All bounded; all lost at a restart.

Pure: no clock, no I/O.
"""

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct

from headway.v1 import reward_pb2 as pb

MAX_STRIKES = 3
MAX_CACHED = 65536
MAX_REMEMBERED = 4096
NUM_SLOWEST = 10
LENGTHS = Struct("<6Q")
STATUS_NAMES = {value: name.removeprefix("SCORE_STATUS_").lower() for name, value in pb.ScoreStatus.items()}


def item_key(function: str, item: pb.ScoreItem) -> bytes:
    """Digest of everything that the result of an item depends on."""
    texts = (function.encode(), item.prompt.encode(), item.completion.encode())
    parts = (*texts, item.prompt_ids, item.completion_ids, item.data_json)
    return blake2b(b"".join((LENGTHS.pack(*map(len, parts)), *parts)), digest_size=16).digest()


class AnswerCache:
    """The newest answers of pure functions."""

    def __init__(self, capacity: int = MAX_CACHED) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[bytes, pb.ScoreResult] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> pb.ScoreResult | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: pb.ScoreResult) -> None:
        self._answers[key] = answer
        if len(self._answers) > self._capacity:
            self._answers.popitem(last=False)


class Strikes:
    """Items that killed workers; after MAX_STRIKES they are not run again."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._strikes: OrderedDict[bytes, tuple[int, str]] = OrderedDict()

    def add(self, key: bytes, item_id: str) -> None:
        count = self._strikes.pop(key, (0, ""))[0]
        self._strikes[key] = (count + 1, item_id)
        if len(self._strikes) > self._capacity:
            self._strikes.popitem(last=False)

    def is_quarantined(self, key: bytes) -> bool:
        return bool(self._strikes) and self._strikes.get(key, (0, ""))[0] >= MAX_STRIKES

    def quarantined(self, limit: int = 100) -> list[str]:
        """Ids of quarantined items, newest first."""
        ids = [item_id for count, item_id in reversed(self._strikes.values()) if count >= MAX_STRIKES]
        return ids[:limit]


@dataclass
class Account:
    """Counts since the start, and the slowest items."""

    num_by_status: Counter[str] = field(default_factory=Counter)
    num_cached: int = 0
    num_shed: int = 0
    _slowest: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, function: str, result: pb.ScoreResult) -> None:
        self.num_by_status[STATUS_NAMES[result.status]] += 1
        self.num_cached += result.is_cached
        if result.is_cached or (len(self._slowest) == NUM_SLOWEST and result.elapsed_s <= self._slowest[0][0]):
            return
        heapq.heappush(self._slowest, (result.elapsed_s, result.item_id, function))
        if len(self._slowest) > NUM_SLOWEST:
            heapq.heappop(self._slowest)

    def slowest(self) -> list[pb.SlowItem]:
        """Longest first."""
        ordered = sorted(self._slowest, reverse=True)
        return [pb.SlowItem(item_id=item, function=function, elapsed_s=s) for s, item, function in ordered]
