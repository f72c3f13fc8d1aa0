"""The door through which every service starts: command line, signals, readiness, exit codes.

A service is an `async with` block, `run(config, placement)`, that yields when it is ready. Production, the local
launcher, compose and the tests all start it through that block.

    exit 0   ended by itself, or by SIGTERM / SIGINT, after a clean end
    exit 2   an error raised on purpose (HeadwayError): one line on stderr says what to do
    exit 1   a bug: a traceback on stderr
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from headway.config import ExperimentConfig, load_experiment
from headway.errors import HeadwayError
from headway.runtime.logs import configure_logging
from headway.runtime.supervisor import Supervisor
from headway.runtime.tracing import tracing

READY_PREFIX = "HEADWAY_READY "
EXIT_MISTAKE = 2
WILDCARDS = ("0.0.0.0", "::", "[::]")
WHEN_DONE = "HEADWAY_WHEN_DONE"
"""`stay`: a service that has ended by itself keeps answering until it is asked to stop. For those who start again
whatever ends, such as Kubernetes' StatefulSets."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where a process lives."""

    name_resolve: str = ""
    """Addresses of name-resolve, "host:port", separated by commas; empty for name-resolve itself."""
    instance: str = "0"
    """Unique among the replicas of a service."""
    host: str = "127.0.0.1"
    """Address to bind."""
    advertise: str = ""
    """Address that others dial; empty: the host."""
    grpc_port: int = 0
    """0: any free one."""
    http_port: int = 0
    """Of an inference service: its engine's."""
    metrics_port: int = 0
    """Of the inference agent's own metrics; others show theirs at their HTTP port."""
    run_dir: Path = Path("runs")
    """The run's folder: resolved config, logs."""

    def address(self, port: int) -> str:
        """What others dial to reach `port` here."""
        return f"{self.advertise or self.host}:{port}"


@dataclass
class Running:
    """A service that is ready."""

    supervisor: Supervisor
    """Ends when the service has done what it is for; raises its first failure."""
    ports: dict[str, int] = field(default_factory=dict)
    """Bound ports by protocol: "grpc", "http"."""


Run = Callable[[ExperimentConfig, Placement], AbstractAsyncContextManager[Running]]


def main(service: str, run: Run, argv: Sequence[str] | None = None) -> None:
    """Run a service as this process, and end the process."""
    arguments = _parse(service, argv)
    placement = _placement_of(arguments)
    configure_logging(service, placement.instance)
    try:
        config = load_experiment(arguments.config, arguments.override)
        with tracing(config.rollout.enable_rollout_tracing, service, placement.instance, config.run_name):
            uvloop.run(_serve(service, run, config, placement))
    except HeadwayError as error:
        log.error("%s", error)
        sys.exit(EXIT_MISTAKE)


async def _serve(service: str, run: Run, config: ExperimentConfig, placement: Placement) -> None:
    """Run until the service ends or a signal comes; a signal before it is ready cancels the start."""
    stop, ready = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.ensure_future(stop.wait())
    serving = asyncio.ensure_future(_serve_until(stopped, ready, service, run(config, placement), placement.instance))
    await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not ready.is_set():
        serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    stopped.cancel()


async def _serve_until(
    stopped: "asyncio.Future[Any]",
    ready: asyncio.Event,
    service: str,
    running_service: AbstractAsyncContextManager[Running],
    instance: str,
) -> None:
    async with running_service as running:
        ready.set()
        line = {"service": service, "instance": instance, "ports": running.ports}
        print(f"{READY_PREFIX}{json.dumps(line)}", flush=True)
        ended = asyncio.ensure_future(running.supervisor.wait())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
            if os.environ.get(WHEN_DONE) == "stay":
                log.info("finished; stays until it is asked to stop")
                await stopped
        log.info("stopping: %s", "finished" if ended.done() else "asked to")
        ended.cancel()


OPTIONS = (
    ("config", Path, None, "the experiment file"),
    ("name-resolve", str, "", "host:port[,host:port] of name-resolve"),
    (
        "instance",
        str,
        "",
        "unique among the replicas of this service; default: 0, or the hostname with a wildcard host",
    ),
    ("host", str, "127.0.0.1", "address to bind; 0.0.0.0 or :: binds them all"),
    ("advertise", str, "", "address that others dial; default: the host, or the hostname with a wildcard host"),
    ("grpc-port", int, "0", "0 takes any free port"),
    ("http-port", int, "0", "0 takes any free port; of inference: its engine's"),
    ("metrics-port", int, "0", "of the inference agent's metrics; others have them at their HTTP port"),
    ("run-dir", Path, "runs", "the run's folder"),
)
"""Name, type, default and help of each option; HEADWAY_NAME in the environment gives another default."""


def _parse(service: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m services.{service.replace('-', '_')}")
    for name, kind, default, text in OPTIONS:
        value = os.environ.get(f"HEADWAY_{name.replace('-', '_').upper()}", default)
        parser.add_argument(f"--{name}", type=kind, default=value, required=value is None, help=text)
    parser.add_argument("override", nargs="*", default=[], help="a.b=c, overrides of the experiment file")
    return parser.parse_args(argv)


def _placement_of(arguments: argparse.Namespace) -> Placement:
    """Where the process lives. In a container the wildcard is bound, and the hostname is what others can dial."""
    own_name = socket.gethostname() if arguments.host in WILDCARDS else ""
    return Placement(
        name_resolve=arguments.name_resolve,
        instance=arguments.instance or own_name or "0",
        host=arguments.host,
        advertise=arguments.advertise or own_name,
        grpc_port=arguments.grpc_port,
        http_port=arguments.http_port,
        metrics_port=arguments.metrics_port,
        run_dir=arguments.run_dir,
    )
