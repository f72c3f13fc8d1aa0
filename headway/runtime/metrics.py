"""Prometheus metrics of one process, served as text."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

__all__ = ["CONTENT_TYPE_LATEST", "CollectorRegistry", "expose"]


def expose(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(registry)
