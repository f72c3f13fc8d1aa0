"""Run model-written code: bubblewrap, so that it sees a read-only system, a private /tmp, no network and no one else.

    bubblewrap   own user, process, network, IPC, UTS and cgroup namespaces; nothing is visible but Python and /usr,
                 read-only; /tmp is private and small; no /proc, no /dev but null and urandom; no capabilities;
                 everything inside dies with it, and it dies with its starter
    seccomp      one process, no sockets, nothing of the machine (services/reward/seccomp.py)
    rlimits      memory, CPU seconds, file size, open files: set by the program's first lines, before foreign code

When bubblewrap is not there, or does not work, there is no sandbox, and nothing runs.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from headway.errors import Unavailable
from services.reward import landlock, seccomp

TMP_BYTES = 16 * 2**20
PROBE_TIMEOUT_S = 20.0
CANDIDATE = Path(__file__).with_name("candidate.py")
CANDIDATE_INSIDE = "/candidate.py"
NOBODY = "65534"


@dataclass(frozen=True)
class Layers:
    """What isolates here, and what is missing, with the reason."""

    active: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def has_sandbox(self) -> bool:
        return "bubblewrap" in self.active


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    memory_mb: int = 512
    cpu_s: int = 10
    file_bytes: int = 2**20
    """Longest file that it may write, its output included."""


class Program:
    """Model-written code that runs in the sandbox.

    Used with `with`: at the end of the block it is dead, with everything inside.
    """

    def __init__(self, mode: str, source: str, limits: Limits, stdin: int, stdout: int) -> None:
        """
        Args:
            mode: "program" or "serve": see services/reward/candidate.py.
            source: The code.
            limits: What it may use.
            stdin: Descriptor that it reads.
            stdout: Descriptor that it writes.

        Raises:
            Unavailable: There is no sandbox here, or it did not start the program.
        """
        self._mode, self._source, self._limits = mode, source, limits
        self._stdin, self._stdout = stdin, stdout

    def __enter__(self) -> Self:
        source, (heard, told) = memory_file(self._source.encode(errors="replace")), os.pipe()
        filters = [memory_file(_packed_filter())] if seccomp.is_available() else []
        try:
            self._process = self._spawn(
                [source, told, *filters], [arg for fd in filters for arg in ("--seccomp", str(fd))]
            )
        finally:
            for descriptor in (source, told, *filters):
                os.close(descriptor)
        self.started_at = time.monotonic()
        has_started = os.read(heard, 1) == b"1"
        os.close(heard)
        if not has_started:
            self.kill()
            raise Unavailable("the sandbox did not start the program")
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def _spawn(self, descriptors: list[int], filter_arguments: list[str]) -> "subprocess.Popen[bytes]":
        limits = self._limits
        numbers = [str(limits.memory_mb * 2**20), str(limits.cpu_s), str(limits.file_bytes)]
        arguments = [*numbers, self._mode, str(descriptors[0]), str(descriptors[1])]
        return subprocess.Popen(
            [*_wrapping(), *filter_arguments, *_interpreter(), CANDIDATE_INSIDE, *arguments],
            stdin=self._stdin,
            stdout=self._stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={},
        )

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None: it still runs."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it, and everything inside with it."""
        self._process.kill()
        self._process.wait()

    def own_time_s(self) -> float:
        """Seconds that it has run or slept: those in which it was kept waiting for a CPU do not count."""
        return time.monotonic() - self.started_at - self._starved_s()

    def _starved_s(self) -> float:
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            return int(Path(f"/proc/{children.split()[0]}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file that holds this, at its beginning; the caller closes it."""
    descriptor = os.memfd_create("headway-sandbox", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@cache
def _packed_filter() -> bytes:
    return seccomp.program_filter()


@cache
def _wrapping() -> tuple[str, ...]:
    """The command line of bubblewrap, up to the filter and the program.

    Raises:
        Unavailable: There is no bubblewrap here.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise Unavailable("bubblewrap (bwrap) is not installed")
    base = os.path.realpath(sys.base_prefix)
    folders = (
        ["--ro-bind", "/usr", "/usr"]
        if base.startswith("/usr")
        else ["--ro-bind", "/usr", "/usr", "--ro-bind", base, base]
    )
    links: list[str] = []
    for name in ("lib", "lib32", "lib64", "bin"):
        if Path(f"/{name}").is_symlink():
            links += ["--symlink", f"usr/{name}", f"/{name}"]
        elif Path(f"/{name}").is_dir():
            links += ["--ro-bind", f"/{name}", f"/{name}"]
    return (
        *(
            found,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--as-pid-1",
            "--clearenv",
            "--cap-drop",
            "ALL",
        ),
        *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", *folders, *links),
        *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom"),
        *(
            "--ro-bind",
            str(CANDIDATE),
            CANDIDATE_INSIDE,
            "--size",
            str(TMP_BYTES),
            "--tmpfs",
            "/tmp",
            "--chdir",
            "/tmp",
        ),
        *("--remount-ro", "/"),
    )


def _interpreter() -> tuple[str, ...]:
    """The Python of this process, alone: no site, no environment, no user folders."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.join(os.path.realpath(sys.base_prefix), "bin", version), "-I", "-S", "-B"


@cache
def layers() -> Layers:
    """Try what isolates here. Takes some ten milliseconds the first time."""
    active, missing = ["processes", "rlimits"], []
    for name, is_there in (("seccomp", seccomp.is_available()), ("landlock", landlock.is_available())):
        if is_there:
            active.append(name)
        else:
            missing.append(f"{name}: the kernel does not offer it")
    reason = _probe()
    if reason:
        missing.append(f"bubblewrap: {reason}")
    else:
        active.append("bubblewrap")
    return Layers(tuple(active), tuple(missing))


def _probe() -> str:
    """Why the sandbox does not work; empty: it does."""
    try:
        command = [*_wrapping(), *_interpreter(), "-c", "print(7)"]
        tried = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False, env={})
    except (Unavailable, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.returncode == 0 and tried.stdout == b"7\n":
        return ""
    return tried.stderr.decode(errors="replace").strip()[:300] or f"it ended with {tried.returncode}"
