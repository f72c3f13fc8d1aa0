"""The reward service's door for people: its status as JSON, and metrics for Prometheus. Read only."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.errors import InvalidInput
from headway.runtime.metrics import CONTENT_TYPE_LATEST, expose
from services.reward.scoring import Scoring


@asynccontextmanager
async def serve_http(scoring: Scoring, host: str, port: int) -> AsyncIterator[int]:
    """Serve /v1/status, /metrics and /health until the block is left; yields the bound port.

    Raises:
        InvalidInput: The port is in use.
    """
    runner = web.AppRunner(make_http_api(scoring), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise InvalidInput(
                f"cannot serve HTTP on {host}:{port}: {error.strerror} (0 takes any free port)"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def make_http_api(scoring: Scoring) -> web.Application:
    registry = CollectorRegistry()
    registry.register(RewardMetrics(scoring))

    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(MessageToDict(scoring.status(), preserving_proto_field_name=True))

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(body=expose(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def get_health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes(
        [web.get("/v1/status", get_status), web.get("/metrics", get_metrics), web.get("/health", get_health)]
    )
    return app


class RewardMetrics(Collector):
    """Reads the status when it is asked; nothing is counted twice."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        status = self._scoring.status()
        items = CounterMetricFamily("headway_reward_items", "Scored items by result.", labels=["status"])
        for name, count in status.num_by_status.items():
            items.add_metric([name], count)
        slowest = GaugeMetricFamily(
            "headway_reward_slowest_seconds", "The ten slowest items.", labels=["item", "function"]
        )
        for item in status.slowest:
            slowest.add_metric([item.item_id, item.function], item.elapsed_s)
        yield items
        yield slowest
        yield CounterMetricFamily("headway_reward_cached", "Items answered from the cache.", status.num_cached)
        yield CounterMetricFamily("headway_reward_shed", "Items refused: the queue was full.", status.num_shed)
        yield CounterMetricFamily(
            "headway_reward_workers_replaced", "Workers that were ended or died.", status.num_workers_replaced
        )
        yield GaugeMetricFamily("headway_reward_queued", "Items that wait.", status.num_queued)
        yield GaugeMetricFamily("headway_reward_running", "Items that workers hold.", status.num_running)
        yield GaugeMetricFamily("headway_reward_aside", "Workers with a slow item, beside the others.", status.num_slow)
        yield GaugeMetricFamily("headway_reward_quarantined", "Items not run any more.", len(status.quarantined))
        layers = InfoMetricFamily("headway_reward_isolation", "Isolation layers in force.")
        layers.add_metric([], {"active": ",".join(status.isolation), "missing": "; ".join(status.missing_isolation)})
        yield layers
