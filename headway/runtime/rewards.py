"""Ask the reward service for rewards: any replica, another one when it is down, and never a made-up number.

    reward_fn -> [a queue] -> a free slot of the least loaded replica -> one streamed call for all that waits
                                    |
                   UNAVAILABLE, RESOURCE_EXHAUSTED: what has no result yet goes to another replica, after a pause

Guarantee: `score` returns what a reward function returned, or raises: RewardTimeout when it ran past its limit, or no
replica answered in time; RewardFailed for everything else. An infrastructure failure is never a reward of 0.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import orjson

from headway.errors import TimedOut
from headway.runtime.grpc_client import connect
from headway.runtime.names import NameClient, Put, Removed, Snapshot
from headway.runtime.tracing import Attributes, current_span, span, trace_headers
from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc
from headway.workflow.errors import RewardFailed, RewardTimeout

log = logging.getLogger(__name__)

PREFIX = "services/reward"
"""Where replicas register."""
scored_item: ContextVar[str] = ContextVar("scored_item", default="")
"""What the running task scores, e.g. "0/17": it names the items in the status of the reward service."""
MAX_ITEMS_PER_CALL = 256
NEW_CALLS_PER_REPLICA = 4
"""Calls without any result yet: while there are so many, items gather for the next one."""
CALLS_PER_REPLICA = 128
QUEUEING_S = 60.0
"""How long an item may wait for its turn, beside its own limit."""
RETRY_PAUSE_S = 0.2
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


@dataclass(slots=True, eq=False)
class Asked:
    """One item that waits for its result."""

    item: pb.ScoreItem
    answer: "asyncio.Future[pb.ScoreResult]"
    span: Any = None
    """Whose work it is."""


class Replica:
    """One reward service."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_calls = 0
        self.new_calls: set[asyncio.Task[None]] = set()
        """Those without any result yet."""
        self.num_items = 0
        self.num_answered = 0
        self.max_items = MAX_ITEMS_PER_CALL
        """Items of one call: halved when it sheds, doubled when it answers."""
        self.rests_until = 0.0
        """Second of the loop's clock before which it is not asked again."""
        self._channel = connect(address)
        self.stub = rpc.RewardStub(self._channel)

    @property
    def has_room(self) -> bool:
        return len(self.new_calls) < NEW_CALLS_PER_REPLICA and self.num_calls < CALLS_PER_REPLICA

    async def status(self, timeout_s: float) -> pb.RewardStatus | str:
        try:
            return await self.stub.GetRewardStatus(pb.GetRewardStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"

    async def close(self) -> None:
        await self._channel.close()


class RewardClient:
    """Rewards from whichever replicas there are.

    Example:
        async with RewardClient(timeout_s=15) as rewards:
            rewards.set_addresses(["10.0.0.4:7001", "10.0.0.5:7001"])
            reward = await rewards.score(completion="... so 42", data={"answer": "42"}, item_id="0/17")
    """

    def __init__(self, timeout_s: float = 15.0, addresses: Iterable[str] = (), queueing_s: float = QUEUEING_S) -> None:
        self._timeout_s = timeout_s
        self._queueing_s = queueing_s
        self._replicas: dict[str, Replica] = {}
        self._waiting: deque[Asked] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._is_pump_due = False
        self._addresses = tuple(addresses)
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.set_addresses(self._addresses)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._calls | self._closing
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.close()

    @property
    def addresses(self) -> list[str]:
        return list(self._replicas)

    @property
    def num_answered(self) -> dict[str, int]:
        """Items answered by each replica."""
        return {replica.address: replica.num_answered for replica in self._replicas.values()}

    async def statuses(self, timeout_s: float = 2.0) -> dict[str, pb.RewardStatus | str]:
        """What each replica says of itself, its isolation layers too; the reason where one does not answer."""
        replicas = list(self._replicas.values())
        return dict(zip(self._replicas, await asyncio.gather(*[r.status(timeout_s) for r in replicas]), strict=True))

    @property
    def num_waiting(self) -> int:
        """Items that no replica has been asked for yet."""
        return len(self._waiting)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """The replicas that there are now. Calls that are running on one that is gone go on to their end."""
        wanted = set(addresses)
        for address in wanted - self._replicas.keys():
            self._replicas[address] = Replica(address)
        for address in self._replicas.keys() - wanted:
            self._close_later(self._replicas.pop(address))
        self._changed.set()
        self._changed = asyncio.Event()
        self._pump_soon()

    async def wait_for_replicas(self, count: int, timeout_s: float) -> None:
        """Wait until so many replicas are known.

        Raises:
            TimedOut: They are not; the message says how many are.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._replicas) < count:
                    await self._changed.wait()
        except TimeoutError:
            raise TimedOut(f"{len(self._replicas)} of {count} reward services after {timeout_s:.0f} s") from None

    def _close_later(self, replica: Replica) -> None:
        async def close() -> None:
            await asyncio.sleep(self._timeout_s if replica.num_calls else 0)
            await replica.close()

        task = asyncio.get_running_loop().create_task(close(), name=f"close {replica.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def reward_fn(
        self, prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], /, **data: Any
    ) -> float:
        """The reward callable of a workflow; a row may have a `prompt` of its own."""
        return await self.score(completion, prompt, data, prompt_ids, completion_ids)

    async def score(
        self,
        completion: str,
        prompt: str = "",
        data: dict[str, Any] | None = None,
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        *,
        item_id: str = "",
        function: str = "",
        timeout_s: float = 0.0,
    ) -> float:
        """The reward of one completion.

        Args:
            completion: What was generated.
            prompt: What it answers.
            data: The dataset row, JSON-able: keyword arguments of the function.
            prompt_ids: Token ids of the prompt.
            completion_ids: Token ids of the completion.
            item_id: Names the item in logs and status; default: what `scored_item` says.
            function: A function instead of the one in the experiment file.
            timeout_s: A limit below the one in the experiment file; 0: that one.

        Raises:
            RewardTimeout: The function ran past its limit, or no service answered in time.
            RewardFailed: The function failed, declined, or gave no number; or the service refused.
        """
        item = pb.ScoreItem(
            item_id=item_id or scored_item.get() or str(next(self._numbers)),
            prompt=prompt,
            completion=completion,
            prompt_ids=_packed(prompt_ids),
            completion_ids=_packed(completion_ids),
            data_json=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY) if data else b"",
            function=function,
            timeout_s=timeout_s,
        )
        return reward_of(await self._result(item))

    async def _result(self, item: pb.ScoreItem) -> pb.ScoreResult:
        asked = Asked(item, asyncio.get_running_loop().create_future(), current_span())
        self._waiting.append(asked)
        self._pump_soon()
        try:
            async with asyncio.timeout(self._timeout_s + self._queueing_s):
                return await asked.answer
        except TimeoutError:
            raise RewardTimeout(self._no_answer(item)) from None

    def _no_answer(self, item: pb.ScoreItem) -> str:
        replicas = ", ".join(self._replicas) or "there is none"
        limit_s = self._timeout_s + self._queueing_s
        return f"item {item.item_id}: no reward service answered within {limit_s:.0f} s ({replicas})"

    def _pump_soon(self) -> None:
        """Send what waits at the end of this turn of the loop, so that items asked for together travel together."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        while self._waiting and (replica := self._best_replica()) is not None:
            batch = self._take(replica.max_items)
            if batch:
                self._start_call(replica, batch)

    def _best_replica(self) -> Replica | None:
        """The least loaded replica that has a free slot and did not just fail."""
        now = asyncio.get_running_loop().time()
        free = [replica for replica in self._replicas.values() if replica.has_room and replica.rests_until <= now]
        return min(free, key=lambda replica: replica.num_items, default=None)

    def _take(self, max_items: int) -> list[Asked]:
        """The next call's items: a fair share of what waits, so that the other replicas get theirs."""
        share = -(-len(self._waiting) // len(self._replicas))
        taken = [self._waiting.popleft() for _ in range(min(share, max_items))]
        return [asked for asked in taken if not asked.answer.done()]

    def _start_call(self, replica: Replica, batch: list[Asked]) -> None:
        replica.num_calls += 1
        replica.num_items += len(batch)
        task = asyncio.get_running_loop().create_task(self._call(replica, batch), name=f"score at {replica.address}")
        replica.new_calls.add(task)
        task.add_done_callback(replica.new_calls.discard)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, replica: Replica, batch: list[Asked]) -> None:
        missing = dict(enumerate(batch))
        try:
            await self._stream(replica, missing)
            replica.max_items = min(2 * replica.max_items, MAX_ITEMS_PER_CALL)
            self._fail(missing.values(), "the service ended its answer early")
        except grpc.aio.AioRpcError as error:
            self._on_call_failed(replica, missing, error)
        finally:
            replica.num_calls -= 1
            replica.num_items -= len(missing)
            self._pump_soon()

    async def _stream(self, replica: Replica, missing: dict[int, Asked]) -> None:
        """One call; answered items leave `missing`."""
        request = pb.ScoreRequest(items=[asked.item for asked in missing.values()])
        first, *others = (asked.span for asked in missing.values())
        about: Attributes = {"server.address": replica.address, "headway.items": len(missing)}
        with span("headway.v1.Reward/Score", about, calls_out=True, parent=first, links=others):
            metadata = tuple(trace_headers().items())
            limit_s = self._timeout_s + self._queueing_s
            async for reply in replica.stub.Score(request, timeout=limit_s, metadata=metadata):
                self._take_in(replica, missing, reply)

    def _take_in(self, replica: Replica, missing: dict[int, Asked], reply: pb.ScoreReply) -> None:
        for result in reply.results:
            asked = missing.pop(result.index, None)
            if asked is None:
                continue
            replica.num_answered += 1
            replica.num_items -= 1
            if not asked.answer.done():
                asked.answer.set_result(result)
        task = asyncio.current_task()
        if task in replica.new_calls:
            replica.new_calls.remove(task)
            self._pump_soon()

    def _on_call_failed(self, replica: Replica, missing: dict[int, Asked], error: grpc.aio.AioRpcError) -> None:
        """Let another replica, or this one a little later, score what has no result; refusals are final."""
        if error.code() not in AGAIN:
            self._fail(missing.values(), f"{replica.address}: {error.code().name}: {error.details()}")
            return
        log.info("%s: %s: %d items go elsewhere: %s", replica.address, error.code().name, len(missing), error.details())
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            replica.max_items = max(1, replica.max_items // 2)
        loop = asyncio.get_running_loop()
        replica.rests_until = loop.time() + RETRY_PAUSE_S
        loop.call_later(RETRY_PAUSE_S, self._pump_soon)
        self._waiting.extendleft(reversed(missing.values()))

    def _fail(self, failed: Iterable[Asked], reason: str) -> None:
        for asked in failed:
            if not asked.answer.done():
                asked.answer.set_exception(RewardFailed(f"item {asked.item.item_id}: {reason}"))


async def follow_replicas(names: NameClient, rewards: RewardClient) -> None:
    """Keep the client's addresses those that are registered in name-resolve, for ever: a task for the supervisor."""
    found: dict[str, str] = {}
    async for event in names.watch(PREFIX):
        match event:
            case Snapshot():
                found = {entry.name: entry.value for entry in event.entries}
            case Put():
                found[event.entry.name] = event.entry.value
            case Removed():
                found.pop(event.name, None)
        rewards.set_addresses(found.values())


def reward_of(result: pb.ScoreResult) -> float:
    """The reward in a result.

    Raises:
        RewardTimeout: The function ran past its limit.
        RewardFailed: The function failed, declined, or gave no number.
    """
    if result.status == pb.SCORE_STATUS_OK:
        return result.reward
    status = pb.ScoreStatus.Name(result.status).removeprefix("SCORE_STATUS_").lower()
    text = f"item {result.item_id}: {status}: {result.message}"
    raise RewardTimeout(text) if result.status == pb.SCORE_STATUS_TIMEOUT else RewardFailed(text)


def _packed(ids: Sequence[int]) -> bytes:
    """int32, little-endian."""
    return np.asarray(ids, "<i4").tobytes() if len(ids) else b""
