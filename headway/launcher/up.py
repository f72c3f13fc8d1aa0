"""`headway up`: start everything on this machine, show how it goes, end with a report, leave nothing behind.

    preflight -> etcd -> name-resolve -> reward, rollout-controller, trainer, inference -> training -> report
                     \\__________ any failure, or Ctrl-C: everything ends within ten seconds __________/

Each line of the start-up is a service that has become ready; then one live line; then the summary.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import orjson
from rich.console import Console

import headway
from headway.config import save_resolved
from headway.config.machine import Status, memory
from headway.errors import Unavailable
from headway.launcher.doctor import problems_text
from headway.launcher.live import LiveLine, Pace, phase_text
from headway.launcher.plan import Launch, etcd, move_aside
from headway.launcher.preflight import free_ports, preflight
from headway.launcher.processes import Child, ChildFailed, Command, Processes, processes
from headway.launcher.progress import progress_line, summary_text
from headway.launcher.report import write_report
from headway.launcher.rest import answers, fetch
from headway.launcher.token import api_token, token_file
from headway.runtime.grpc_client import connect
from headway.runtime.names import NameClient
from headway.v1 import trainer_pb2 as pb
from headway.v1.trainer_pb2_grpc import TrainerStub
from headway.view.finished import ANSWERS, KEPT, REPORT

READY_TIMEOUT_S = 120.0
REFRESH_S = 0.5
CALL_TIMEOUT_S = 5.0
EXIT_INTERRUPTED = 130


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


async def up(launch: Launch, console: Console) -> dict[str, Any]:
    """Run an experiment to its end on this machine; returns the summary of the report.

    Raises:
        HeadwayError: A mistake in the file, or a child that failed.
        Interrupted: By a signal.
    """
    started_at = time.monotonic()
    preflight(launch.config)
    for old, new in move_aside(launch.config) if launch.config.recover.mode == "disabled" else ():
        console.print(f"[dim]earlier files of this trial: {old} is now {new.name}[/dim]")
    paths = launch.config.paths
    for folder in (paths.run, paths.logs):
        folder.mkdir(parents=True, exist_ok=True)
    save_resolved(launch.config, paths.run / "config.yaml")
    if (found := memory(launch.config)) is not None and found.status is Status.NOTE:
        console.print(f"note: {found.text}", markup=False)
    console.print(f"headway {headway.__version__}  {launch.config.run_name}  logs in {paths.logs}")

    def on_retry(failure: ChildFailed) -> None:
        console.print(f"{failure}\n  starting it again", markup=False)

    async with processes(paths.logs, on_retry) as running:
        session = Session(launch, running, console, started_at)
        report = await _until_signal(session.run())
    summary = write_report(report, time.monotonic() - started_at, paths.run)
    console.print(summary_text(summary, paths.run))
    if problems := problems_text(report):
        console.print(problems, markup=False, style="yellow")
    return summary


class Session:
    """One launch while it runs."""

    def __init__(self, launch: Launch, running: Processes, console: Console, started_at: float) -> None:
        self._launch = launch
        self._config = launch.config
        self._running = running
        self._console = console
        self._started_at = started_at
        self._token = api_token(launch.config.paths.run)

    async def run(self) -> dict[str, Any]:
        """Start everything, follow the training to its end; the controller's report."""
        launch, name_resolve = await self._running.guarded(self._start_foundation())
        controller, trainer, *others = [await self._running.start(one) for one in _services(launch, name_resolve)]
        await self._running.guarded(self._all_ready(trainer, [controller, trainer, *others]))
        url = f"http://{self._config.services.host}:{controller.ports['http']}"
        self._console.print(f"  dashboard: {url}/   status: {url}/v1/status   documentation: {url}/docs")
        if (path := token_file(self._config.paths.run)) is not None:
            self._console.print(f"  control needs the token in {path}", markup=False)
        return await self._running.guarded(self._follow(url, trainer))

    async def _start_foundation(self) -> tuple[Launch, str]:
        """etcd where the file gives none, and name-resolve; the launch with the one's address, and the other's."""
        launch = self._launch
        names = self._config.cluster.name_resolve
        if names.type == "etcd3" and not names.etcd3_addr:
            address = await self._start_etcd()
            launch = replace(launch, overrides=[*launch.overrides, f"cluster.name_resolve.etcd3_addr={address}"])
        child = await self._running.start(launch.service("name-resolve", 0, ""))
        await self._ready(child)
        address = f"{self._config.services.host}:{child.ports['grpc']}"
        if self._config.recover.mode == "disabled":
            async with NameClient(address, self._config.run_name) as client:
                await client.clear("", with_versions=True)
        return launch, address

    async def _start_etcd(self) -> str:
        client_port, peer_port = free_ports(2)
        child = await self._running.start(etcd(self._config.paths.run / "etcd", client_port, peer_port))
        address = f"127.0.0.1:{client_port}"
        await answers(f"http://{address}/health", READY_TIMEOUT_S)
        self._show_ready(child, address)
        return address

    async def _ready(self, child: Child, timeout_s: float = READY_TIMEOUT_S) -> None:
        await child.ready(timeout_s)
        self._show_ready(child, "  ".join(f"{kind} {port}" for kind, port in child.ports.items()))

    async def _all_ready(self, trainer: Child, children: Sequence[Child]) -> None:
        """Wait for all, each shown as it becomes ready. Engines wait for the first version: through the warm start."""
        timeout_s = READY_TIMEOUT_S + self._config.inference.start_timeout_s
        showing = asyncio.ensure_future(self._show_warm_start(trainer))
        try:
            await asyncio.gather(*(self._ready(child, timeout_s) for child in children))
        finally:
            showing.cancel()
            await asyncio.wait({showing})

    async def _show_warm_start(self, trainer: Child) -> None:
        """What the trainer does while the others wait for its first version."""
        await trainer.is_ready.wait()
        async with self._asking(trainer) as ask:
            with LiveLine(self._console) as line:
                while True:
                    phase, _ = await ask()
                    line.show(f"trainer: {phase}")
                    await asyncio.sleep(REFRESH_S)

    def _show_ready(self, child: Child, where: str) -> None:
        elapsed_s = time.monotonic() - self._started_at
        self._console.print(
            f"  {child.command.name:<22}[green]ready[/green] {elapsed_s:6.1f} s   pid {child.pid:<8} {where}"
        )

    async def _follow(self, url: str, trainer: Child) -> dict[str, Any]:
        """Show the live line until the trainer has ended; then the controller's report."""
        ended = asyncio.ensure_future(trainer.has_ended.wait())
        pace = Pace()
        async with self._asking(trainer) as ask:
            with LiveLine(self._console) as line:
                while not ended.done():
                    await asyncio.wait({ended}, timeout=REFRESH_S)
                    with contextlib.suppress(Unavailable):
                        status = await fetch(f"{url}/v1/status", self._token)
                        phase, total_steps = await ask()
                        seconds_left = pace.seconds_left(status["num_steps"], total_steps, time.monotonic())
                        line.show(progress_line(status, total_steps, seconds_left, phase))
        report = await fetch(f"{url}/v1/report", self._token)
        await self._keep_answers(url, report)
        return report

    async def _keep_answers(self, url: str, report: dict[str, Any]) -> None:
        """What `headway view` shows of the controller when it is gone."""
        answers = {REPORT: report}
        for path in KEPT:
            with contextlib.suppress(Unavailable):
                answers[path] = await fetch(f"{url}{path}", self._token)
        (self._config.paths.run / ANSWERS).write_bytes(orjson.dumps(answers))

    @asynccontextmanager
    async def _asking(self, trainer: Child) -> AsyncIterator[Callable[[], Awaitable[tuple[str, int]]]]:
        """A call that gives the trainer's phase and its number of steps; the last ones while it does not answer."""
        last = ("starting", 0)
        channels: dict[str, grpc.aio.Channel] = {}

        async def ask() -> tuple[str, int]:
            nonlocal last
            address = f"{self._config.services.host}:{trainer.ports['grpc']}"  # another one after a retry
            if address not in channels:
                channels[address] = connect(address)
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await TrainerStub(channels[address]).GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
                last = (phase_text(answer), answer.total_steps or last[1])
            return last

        try:
            yield ask
        finally:
            for channel in channels.values():
                await channel.close()


def _services(launch: Launch, name_resolve: str) -> list[Command]:
    """Everything that needs name-resolve: the rollout-controller, the trainer, and the others."""
    port = launch.config.services.controller_http_port
    return [
        launch.service("rollout-controller", 0, name_resolve, http_port=port),
        launch.trainer(name_resolve),
        launch.service("reward", 0, name_resolve),
        *(launch.service("inference", number, name_resolve) for number in range(launch.config.allocation.num_servers)),
    ]


async def _until_signal(work: Any) -> Any:
    """The result of `work`, unless a signal comes first.

    Raises:
        Interrupted: SIGINT or SIGTERM came.
    """
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(interrupted.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.wait({working})
    raise Interrupted
