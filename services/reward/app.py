"""The reward service: one door for production, the local launcher and the tests."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

from headway.config import ExperimentConfig
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.metrics_http import serve_app
from headway.runtime.names import NameClient
from headway.runtime.service import Placement, Running
from headway.runtime.supervisor import Supervisor
from headway.v1 import reward_pb2_grpc as rpc
from services.reward.grpc_api import SERVICE, RewardApi
from services.reward.http_api import make_http_api
from services.reward.plan import plan_of
from services.reward.pool import Pool, PoolSettings
from services.reward.scoring import Scoring


@asynccontextmanager
async def run(config: ExperimentConfig, placement: Placement) -> AsyncIterator[Running]:
    """Serve until the block is left; what was accepted is then finished first, within the limit of an item.

    Raises:
        InvalidInput: A function cannot be loaded, or `reward.kwargs` does not fit.
    """
    plan = plan_of(config)
    settings = PoolSettings(
        functions=plan.functions,
        warm=[*plan.weights] or ["math"],
        constants=plan.constants or {},
        num_workers=config.reward.num_workers,
        memory_limit_mb=config.reward.memory_limit_mb,
        max_queued=config.reward.max_queued,
    )
    async with (
        Supervisor() as supervisor,
        Pool(settings) as pool,
        aclosing(Scoring(pool, plan, config.reward.timeout_s)) as scoring,
    ):
        supervisor.start("reward pool", _raise_failure(pool.crew.failed))
        api = RewardApi(scoring)
        add = partial(rpc.add_RewardServicer_to_server, api)
        async with (
            serve_app(make_http_api(scoring, config.run_name), placement.host, placement.http_port) as http_port,
            serve_grpc(placement.host, placement.grpc_port, add, [SERVICE]) as server,
        ):
            running = Running(supervisor, {"grpc": server.port, "http": http_port})
            async with _registered(config, placement, running.ports, pool.layers):
                yield running
            await server.set_serving(False)
            await scoring.drain(config.reward.timeout_s + 1)


@asynccontextmanager
async def _registered(
    config: ExperimentConfig, placement: Placement, ports: Mapping[str, int], layers: Sequence[str]
) -> AsyncIterator[None]:
    """Be found through name-resolve while the block runs, where there is one."""
    if not placement.name_resolve:
        yield
        return
    async with NameClient(placement.name_resolve, config.run_name) as names:
        about = {
            "http": placement.address(ports["http"]),
            "pid": str(os.getpid()),
            "isolation": ", ".join(layers),
        }
        await names.register(f"services/reward/{placement.instance}", placement.address(ports["grpc"]), metadata=about)
        yield


async def _raise_failure(failed: "asyncio.Future[None]") -> None:
    await asyncio.shield(failed)
