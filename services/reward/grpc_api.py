"""The wire side: requests become jobs, and results stream back as they finish."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc
from services.reward.scoring import Scoring

SERVICE = "headway.v1.Reward"
GATHER_WHEN_MISSING = 8
GATHER_S = 0.008
"""While so many results are missing, those of some milliseconds travel together."""


class RewardApi(rpc.RewardServicer):
    """Serves Score, ListFunctions and GetRewardStatus."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ScoreReply]:
        results: list[pb.ScoreResult] = []
        arrived = asyncio.Event()

        def add(result: pb.ScoreResult) -> None:
            results.append(result)
            arrived.set()

        jobs = self._scoring.score(request.items, add)
        num_missing = len(request.items)
        try:
            while num_missing:
                await arrived.wait()
                if num_missing - len(results) >= GATHER_WHEN_MISSING:
                    await asyncio.sleep(GATHER_S)
                arrived.clear()
                reply = pb.ScoreReply(results=results)
                num_missing -= len(results)
                results.clear()
                yield reply
        finally:
            if num_missing:
                self._scoring.abandon(jobs)

    async def ListFunctions(
        self, request: pb.ListFunctionsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListFunctionsReply:
        return pb.ListFunctionsReply(functions=self._scoring.functions())

    async def GetRewardStatus(
        self, request: pb.GetRewardStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RewardStatus:
        return self._scoring.status()
