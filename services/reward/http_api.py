"""The reward service's door for people: its status as JSON, and metrics for Prometheus. Read only."""

from collections.abc import Iterable

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from prometheus_client.core import Metric

from headway.runtime.metrics import families, info, registry
from headway.runtime.metrics_http import metrics_app
from headway.runtime.metrics_table import REWARD
from services.reward.scoring import Scoring


def make_http_api(scoring: Scoring, run_name: str) -> web.Application:
    """`/v1/status`, `/metrics` and `/health`."""

    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(MessageToDict(scoring.status(), preserving_proto_field_name=True))

    app = metrics_app(registry(REWARD, run_name, None, lambda: reward_metrics(scoring)))
    app.add_routes([web.get("/v1/status", get_status)])
    return app


def reward_metrics(scoring: Scoring) -> Iterable[Metric]:
    """The metrics of this moment."""
    status = scoring.status()
    yield from families(
        {
            "headway_reward_items_total": status.num_by_status,
            "headway_reward_cached_total": status.num_cached,
            "headway_reward_shed_total": status.num_shed,
            "headway_reward_workers_replaced_total": status.num_workers_replaced,
            "headway_reward_workers": status.num_workers,
            "headway_reward_queued": status.num_queued,
            "headway_reward_running": status.num_running,
            "headway_reward_aside": status.num_slow,
            "headway_reward_quarantined": len(status.quarantined),
        }
    )
    yield scoring.latency.family("headway_reward_seconds")
    isolation = ",".join(status.isolation), "; ".join(status.missing_isolation)
    yield info("headway_reward_isolation_info", *isolation)
