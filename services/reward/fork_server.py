"""The fork server: one small process that has imported what reward functions need, and forks workers in milliseconds.

It speaks datagrams of JSON with the service, and runs no reward function itself.

    service -> {"do": "fork", "number": N}  with two descriptors: the worker's socket and its progress page
               {"do": "kill", "pid": P}
    server  -> {"ready": {function: what is known of it}, "layers": [...], "missing": [...]} or {"failed": why}, once;
               {"forked": N, "pid": P} or {"not_forked": N, "why": why}; {"ended": P, "status": wait status}

When the service is gone, so are the fork server and every worker: no orphans.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import asdict
from typing import Any, NoReturn

import services.reward.functions  # noqa: F401 - registers what only the service has
from headway.reward.registry import find_function
from services.reward.sandbox import layers
from services.reward.seal import seal_of
from services.reward.wire import ProgressPage
from services.reward.worker import WorkerSettings, become_worker, serve

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_DATAGRAM_BYTES = 65536
LIBC = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """Forks, kills and reaps workers until its control socket closes."""

    def __init__(self, control: socket.socket, settings: WorkerSettings) -> None:
        self._control = control
        self._settings = settings
        self._children: set[int] = set()

    def run(self) -> None:
        woken = _wake_on_child_end()
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        while True:
            readable, _, _ = select.select([self._control.fileno(), woken], [], [])
            if woken in readable:
                os.read(woken, 4096)
            self._reap()
            if self._control.fileno() in readable and not self._obey():
                break
        for pid in list(self._children):
            self._kill(pid)
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_DATAGRAM_BYTES, 2)
        except ConnectionResetError:
            return False
        if not data:
            return False
        order = json.loads(data)
        if order["do"] == "fork":
            self._fork(order["number"], descriptors)
        else:
            self._kill(order["pid"])
        return True

    def _fork(self, number: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self._say({"not_forked": number, "why": str(error)})
        if pid == 0:
            self._control.close()
            _run_worker(descriptors, self._settings)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._children.add(pid)
            self._say({"forked": number, "pid": pid})

    def _kill(self, pid: int) -> None:
        """Kill a worker and its process group; a pid that is not an unreaped child of ours is left alone."""
        if pid in self._children:
            for kill, target in ((os.killpg, pid), (os.kill, pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(target, signal.SIGKILL)

    def _reap(self) -> None:
        """Report the workers that have ended, and kill what they left behind: it is ours, as the subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if pid in self._children:
                self._children.discard(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self._say({"ended": pid, "status": status})
        for stray in _children_of_this_process() - self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(message).encode())


def _run_worker(descriptors: list[int], settings: WorkerSettings) -> NoReturn:
    """The life of a forked child; never returns into the fork server's code."""
    status = 1
    try:
        die_with_parent()
        become_worker()
        connection, page = socket.socket(fileno=descriptors[0]), ProgressPage(descriptors[1])
        serve(connection, page, settings)
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0
    finally:
        os._exit(status)


def _children_of_this_process() -> set[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            return set(map(int, children.read().split()))
    except FileNotFoundError:
        return set()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wake_on_child_end() -> int:
    """A descriptor that becomes readable when a child ends."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def describe(names: list[str]) -> dict[str, dict[str, Any]]:
    """What the service must know of each function.

    Raises:
        InvalidInput: A function cannot be loaded.
    """
    functions = [find_function(name) for name in names]
    return {
        f.name: {"summary": f.summary, "seal": seal_of(f), "is_async": f.is_async, **asdict(f.traits)}
        for f in functions
    }


def warm(names: list[str]) -> None:
    """Import what the functions need, so that every worker is born with it."""
    for name in names:
        for module in find_function(name).traits.imports:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ready = {"ready": describe(settings["functions"]), "layers": layers().active, "missing": layers().missing}
        warm(settings["warm"])
    except Exception as error:  # noqa: BLE001 - the boundary of this process: the service says what is wrong
        control.send(json.dumps({"failed": f"{error}"}).encode())
        return
    control.send(json.dumps(ready).encode())
    protected = (os.getpid(), os.getppid())
    ForkServer(control, WorkerSettings(settings["constants"], settings["memory_limit_bytes"], protected)).run()


if __name__ == "__main__":
    main()
