"""Start other programs from a process that speaks gRPC.

gRPC's threads make it unsafe to run Python between fork and exec: now and then the child crashes. So nothing of this
process runs there; `tied.py` does in the child what would have been done, and then becomes the program.

Guarantee: the program has a process group of its own, and gets `death_signal` when this process dies, however it dies
(on Linux).
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TIED = str(Path(__file__).with_name("tied.py"))


class Spawned:
    """A running program, and everything in its process group."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self.returncode: int | None = None
        """Negative: the signal that ended it. None: it runs."""
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._reap, name=f"wait for {self.pid}", daemon=True).start()

    async def wait(self) -> int:
        """Wait until the program has ended; its exit code."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; none is left to get it: nothing happens."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _reap(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._on_end, code)

    def _on_end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    death_signal: int = signal.SIGKILL,
    *,
    stdin: int = subprocess.DEVNULL,
    inherits: bool = True,
) -> Spawned:
    """Start a program; stdout and stderr go to `output`.

    Args:
        argv: The program and its arguments.
        environment: Added to this process's own.
        output: A file descriptor; the caller closes it.
        death_signal: What the program gets when this process dies.
        stdin: A file descriptor; the caller closes it. By default it is empty.
        inherits: Whether this process's own environment counts.

    Raises:
        FileNotFoundError: There is no such program.
    """
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(2, os.strerror(2), argv[0])
    tied = [sys.executable, "-I", "-S", TIED, str(int(death_signal)), str(os.getpid())]
    process = subprocess.Popen(
        [*tied, *argv],
        stdin=stdin,
        stdout=output,
        stderr=output,
        env={**os.environ, **environment} if inherits else dict(environment),
        start_new_session=True,
    )
    return Spawned(process)
