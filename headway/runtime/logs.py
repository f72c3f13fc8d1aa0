"""Logging: one line an event, on stderr, with the service's name."""

import logging
import os
import sys


def configure_logging(service: str, instance: str) -> None:
    """Log to stderr; HEADWAY_LOG_LEVEL sets the level (default INFO)."""
    formatter = logging.Formatter(f"%(asctime)s %(levelname)s {service}/{instance} %(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("HEADWAY_LOG_LEVEL", "INFO").upper())
    for chatty in ("httpx", "aiohttp.access", "uvicorn.access", "filelock", "fsspec"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
