"""Start the engines that the contract suite runs against."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.runtime.http_server import serve_http
from services.inference.builtin import BuiltinSettings, start_builtin
from services.inference.http_api import create_app

LAUNCHER = Path(__file__).parents[2] / "tools" / "sglang_cpu" / "launch_cpu.py"
START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def serve_builtin(models: Path) -> Iterator[str]:
    """The built-in engine in a thread with its own event loop."""
    loop = asyncio.new_event_loop()
    started: asyncio.Future[str] = loop.create_future()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(models, started, stop),))
    thread.start()
    url = asyncio.run_coroutine_threadsafe(_value(started), loop).result(60)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _serve(models: Path, started: "asyncio.Future[str]", stop: asyncio.Event) -> None:
    settings = BuiltinSettings(folder=models / "a", weights_roots=(models,), seed=0)
    try:
        async with start_builtin(settings) as builtin, serve_http(create_app(builtin), "127.0.0.1", 0) as port:  # type: ignore[arg-type]
            started.set_result(f"http://127.0.0.1:{port}")
            await stop.wait()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        raise


async def _value(future: "asyncio.Future[str]") -> str:
    return await future


@contextlib.contextmanager
def serve_sglang(models: Path, *more: str) -> Iterator[str]:
    """Real SGLang on CPU as a child process."""
    python = os.environ["HEADWAY_SGLANG_PYTHON"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    flags: dict[str, Any] = {
        "model-path": models / "a",
        "device": "cpu",
        "dtype": "float32",
        "host": "127.0.0.1",
        "port": port,
        "attention-backend": "torch_native",
        "max-total-tokens": 65536,
        "max-running-requests": 64,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    log = (models / "sglang.log").open("wb")
    # with its overlapped schedule, penalties reach the logits one token late
    command = [python, str(LAUNCHER), *words, "--enable-metrics", "--disable-overlap-schedule", *more]
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process, models / "sglang.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/ready"):
            return
        time.sleep(0.5)
    pytest.fail(f"SGLang did not start:\n{log.read_text(errors='replace')[-3000:]}")
