"""Name-resolve's metrics for Prometheus."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from headway.runtime.metrics import families
from services.name_resolve.feed import Feed
from services.name_resolve.grpc_api import NameResolveApi


def names_metrics(feed: Feed, api: NameResolveApi) -> Iterable[Metric]:
    """The metrics of this moment."""
    return families(
        {
            "headway_names_revision": feed.newest,
            "headway_names_store_replaced_total": feed.num_resets,
            "headway_names_sessions": api.num_sessions,
            "headway_names_campaigns": api.num_campaigns,
        }
    )
