"""Nothing that a reward function or model-written code does hurts anything but its own item.

Every attack runs among neighbours in a real service. It must end within its limit plus a second, the neighbours'
results must be right, and nothing may be left behind.
"""

import asyncio
import os
import shutil
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from headway.config import load_experiment
from headway.runtime.grpc_client import connect
from headway.runtime.service import Placement
from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc
from services.reward.app import run
from services.reward.crew import SPARE_TIMES
from services.reward.sandbox import layers

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 1.5
PATIENCE_S = 15.0
"""Limit of what is expected to end by itself, on a slow machine too."""
NEIGHBOURS = 12
needs_sandbox = pytest.mark.skipif(not layers().has_sandbox, reason="; ".join(layers().missing))
needs_seccomp = pytest.mark.skipif("seccomp" not in layers().active, reason="; ".join(layers().missing))

FOREIGN = '''
import os, signal, socket, subprocess, sys, time
from headway.reward import reward_function

def obey(completion, answer):
    """Runs the completion, which is what an unlucky reward function may do."""
    space = {"answer": answer}
    exec(completion, space)
    return space.get("reward", answer)

@reward_function(starts_processes=True)
def obey_with_processes(completion, answer):
    """The same, and it may start processes."""
    return obey(completion, answer)
'''


class Service:
    """A running reward service, spoken to directly."""

    def __init__(self, stub: rpc.RewardStub, port: int) -> None:
        self.stub = stub
        self.port = port

    async def score(self, *items: pb.ScoreItem) -> list[pb.ScoreResult]:
        """The results, in the order of the items."""
        request = pb.ScoreRequest(items=items)
        results = [result async for reply in self.stub.Score(request, timeout=90) for result in reply.results]
        return sorted(results, key=lambda result: result.index)

    async def among_neighbours(self, item: pb.ScoreItem) -> pb.ScoreResult:
        """The result of one item between others, which must be right."""
        others = [scored("exact", str(number % 3), answer="1") for number in range(NEIGHBOURS)]
        others += [scored("foreign_attacks.obey", "reward = answer", answer=number) for number in range(NEIGHBOURS)]
        items = [*others[:NEIGHBOURS], item, *others[NEIGHBOURS:]]
        started = time.monotonic()
        results = await self.score(*items)
        result = results.pop(NEIGHBOURS)
        assert [other.status for other in results] == [pb.SCORE_STATUS_OK] * len(others), results
        rewards = [float(number % 3 == 1) for number in range(NEIGHBOURS)] + [*map(float, range(NEIGHBOURS))]
        assert [other.reward for other in results] == rewards
        assert result.elapsed_s < item.timeout_s + 1
        assert time.monotonic() - started < 60
        return result


def scored(function: str, completion: str, prompt: str = "", **data: Any) -> pb.ScoreItem:
    return pb.ScoreItem(
        item_id="attack",
        function=function,
        prompt=prompt,
        completion=completion,
        data_json=orjson.dumps(data),
        timeout_s=PATIENCE_S,
    )


def limited(item: pb.ScoreItem) -> pb.ScoreItem:
    """The same item with a limit that it will reach."""
    item.timeout_s = LIMIT_S
    return item


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "foreign_attacks.py").write_text(FOREIGN)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(folder: Path) -> AsyncIterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        path = folder / "experiment.yaml"
        path.write_text(
            "experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\n"
            "reward: {function: {foreign_attacks.obey: 1, foreign_attacks.obey_with_processes: 1}, "
            f"timeout_s: {PATIENCE_S}, num_workers: 2, memory_limit_mb: 512}}\n"
        )
        async with run(load_experiment(path), Placement(run_dir=folder)) as running:
            port = running.ports["grpc"]
            channel = connect(f"127.0.0.1:{port}")
            yield Service(rpc.RewardStub(channel), port)
            await channel.close()


# Attacks on the worker, by a reward function.

HANG = {
    "a loop": "while True: pass",
    "a sleep": "import time; time.sleep(3600)",
    "a power tower": "9**9**9**9",
    "a regex that never ends": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "a wait for input of its own": "import os; os.read(os.pipe()[0], 1)",
    "a loop that catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "ignored signals": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)",
}


@pytest.mark.parametrize("attack", HANG.values(), ids=HANG.keys())
async def test_what_never_ends_is_ended(service: Service, attack: str) -> None:
    result = await service.among_neighbours(limited(scored("foreign_attacks.obey", attack, answer=1)))
    assert result.status == pb.SCORE_STATUS_TIMEOUT


async def test_a_pattern_of_the_experiment_that_never_ends_is_ended(service: Service) -> None:
    result = await service.among_neighbours(limited(scored("format", "a" * 60 + "b", pattern="(a+)+$")))
    assert result.status == pb.SCORE_STATUS_TIMEOUT


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9}}}", "\\frac{9^{9^{9^9}}}{3}", "10!!!!!!!", "\\sum_{k=1}^{10^{12}} k^{k}"]
)
async def test_mathematics_that_never_ends_is_ended(service: Service, answer: str) -> None:
    result = await service.among_neighbours(limited(scored("math", f"\\boxed{{{answer}}}", answer="x^2+3")))
    assert result.status in (pb.SCORE_STATUS_TIMEOUT, pb.SCORE_STATUS_KILLED_MEMORY) or result.reward == 0


DEATHS = {
    "exit": ("import os; os._exit(0)", "ended its process (exit code 0)"),
    "SystemExit": ("raise SystemExit(0)", "SystemExit"),
    "abort": ("import os; os.abort()", "SIGABRT"),
    "a wild pointer": ("import ctypes; ctypes.string_at(1)", "SIGSEGV"),
    "endless recursion": ("def f(): return f()\nf()", "RecursionError"),
    "a closed connection": ("import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass", ""),
}


@pytest.mark.parametrize(("attack", "message"), DEATHS.values(), ids=DEATHS.keys())
async def test_death_is_an_error_that_says_what_happened(service: Service, attack: str, message: str) -> None:
    result = await service.among_neighbours(scored("foreign_attacks.obey", attack, answer=1))
    assert result.status == pb.SCORE_STATUS_ERROR
    assert message in result.message


async def test_ten_gigabytes_are_refused(service: Service) -> None:
    result = await service.among_neighbours(scored("foreign_attacks.obey", "x = bytearray(10 * 2**30)", answer=1))
    assert result.status == pb.SCORE_STATUS_KILLED_MEMORY


async def test_memory_that_grows_is_stopped(service: Service) -> None:
    grow = "x = []\nwhile True: x.append(bytes(2**20))"
    result = await service.among_neighbours(scored("foreign_attacks.obey", grow, answer=1))
    assert result.status == pb.SCORE_STATUS_KILLED_MEMORY


async def test_a_gigabyte_of_output_goes_nowhere(service: Service) -> None:
    flood = "import os, sys\nfor _ in range(1024): os.write(1, bytes(2**20)); os.write(2, bytes(2**10))\nprint('x')"
    result = await service.among_neighbours(scored("foreign_attacks.obey", flood, answer=1))
    assert (result.status, result.reward) == (pb.SCORE_STATUS_OK, 1.0)


async def test_a_huge_error_message_is_cut(service: Service) -> None:
    result = await service.among_neighbours(scored("foreign_attacks.obey", "raise ValueError('x' * 10**8)", answer=1))
    assert result.status == pb.SCORE_STATUS_ERROR
    assert len(result.message) < 1000


@needs_seccomp
@pytest.mark.parametrize(
    "attack",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nwhile True: subprocess.Popen(['sleep', '3600'])",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.kill(os.getsid(os.getppid()), 9)",
        "import ctypes, os\nif ctypes.CDLL(None, use_errno=True).ptrace(16, os.getppid(), 0, 0): raise PermissionError",
    ],
)
async def test_a_function_can_neither_start_processes_nor_touch_others(service: Service, attack: str) -> None:
    result = await service.among_neighbours(scored("foreign_attacks.obey", attack, answer=1))
    assert result.status == pb.SCORE_STATUS_ERROR
    assert result.message.startswith("PermissionError")


@needs_seccomp
async def test_a_function_that_may_start_processes_cannot_end_its_parents(service: Service) -> None:
    for target in ("os.getppid()", "-os.getppid()", "-1", str(os.getpid())):
        attack = f"import os; os.kill({target}, 9)"
        result = await service.among_neighbours(scored("foreign_attacks.obey_with_processes", attack, answer=1))
        assert result.message.startswith("PermissionError"), target


async def test_children_of_an_ended_item_end_too(service: Service, folder: Path) -> None:
    """Even those that have left its process group."""
    pids = folder / "pids"
    attack = textwrap.dedent(f"""
        import os, time
        for number in range(20):
            if os.fork() == 0:
                if number % 2: os.setsid()
                with open({str(pids)!r}, "a") as file: file.write(str(os.getpid()) + chr(10))
                time.sleep(3600)
        time.sleep(3600)
    """)
    result = await service.among_neighbours(limited(scored("foreign_attacks.obey_with_processes", attack, answer=1)))
    assert result.status == pb.SCORE_STATUS_TIMEOUT
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 20
    async with asyncio.timeout(30):
        while any(is_running(pid) for pid in started):  # noqa: ASYNC110 - nobody tells when a stranger ends
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Attacks by model-written code, and lies about the tests.

ADD = {"test_list": ["assert add(1, 2) == 3", "assert add(5, 7) == 12"]}
HONEST = "def add(a, b):\n    return a + b\n"


def attacking(body: str) -> str:
    """A right `add` that also does something else when it is called."""
    return f"def add(a, b):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n    return a + b\n"


@needs_sandbox
async def test_right_code_is_right(service: Service) -> None:
    result = await service.among_neighbours(scored("code", f"```python\n{HONEST}```", **ADD))
    assert (result.status, result.reward) == (pb.SCORE_STATUS_OK, 1.0)


LIES = {
    "sys.exit(0)": "import sys; sys.exit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "exit at exit": "import atexit, os; atexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "always equal": "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
    "an int that is always equal": "class Yes(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return Yes(0)",
    "always true": "class Yes:\n    def __bool__(self): return True\n    __eq__ = lambda s, o: s\n"
    "def add(a, b): return Yes()",
    "patched builtins": "import builtins\nbuiltins.AssertionError = None\ndef add(a, b): return 0",
    "answers for later": "import os\ndef add(a, b):\n    for fd in range(64):\n"
    "        try: os.write(fd, b'\\0\\0\\0\\2v3' * 10)\n        except OSError: pass\n    return 0",
    "a false protocol": "import os\nfor fd in range(64):\n"
    "    try: os.write(fd, b'\\xff' * 64)\n    except OSError: pass",
    "dead silence": "import time; time.sleep(3600)",
    "a generator of everything": "def add(a, b):\n    while True: yield 3",
    "no code": "I would add the two numbers.",
    "a nested bomb": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
}


@needs_sandbox
@pytest.mark.parametrize("code", LIES.values(), ids=LIES.keys())
async def test_code_that_does_not_pass_its_tests_gets_nothing(service: Service, code: str) -> None:
    result = await service.among_neighbours(scored("code", code, time_limit_s=1.0, **ADD))
    assert (result.status, result.reward) == (pb.SCORE_STATUS_OK, 0.0)


REFUSED = {
    "fork": "import os; os.fork()",
    "fork in a loop": "import os\nwhile True: os.fork()",
    "a subprocess": "import subprocess; subprocess.run(['true'], check=True)",
    "a socket": "import socket; socket.socket()",
    "a connection": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT')",
    "a write to /usr": "open('/usr/x', 'w')",
    "a write to /": "open('/x', 'w')",
    "a write to its own program": "open('/candidate.py', 'a')",
    "reading /etc/passwd": "open('/etc/passwd').read()",
    "reading the repository": "open('REPOSITORY/pyproject.toml').read()",
    "reading the environment of others": "open('/proc/1/environ').read()",
    "killing its parent": "import os; os.kill(os.getppid(), 9) if os.getppid() else 1 / 0",
    "killing the service": "import os; os.kill(SERVICE, 9)",
    "a device": "open('/dev/mem', 'rb')",
    "10 GB": "x = bytearray(10 * 2**30)",
    "a file of 1 GB": "import os; fd = os.open('/tmp/x', os.O_CREAT | os.O_RDWR); os.ftruncate(fd, 2**30)",
    "unlimiting itself": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "a mount": "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0): raise OSError",
    "a namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
}


@needs_sandbox
@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
async def test_code_that_reaches_out_of_the_sandbox_fails(service: Service, body: str) -> None:
    """Its `add` is right, but for what it tries; the attempt raises, and so the test fails."""
    places = {"PORT": str(service.port), "SERVICE": str(os.getpid()), "REPOSITORY": os.getcwd()}
    for name, value in places.items():
        body = body.replace(name, value)
    result = await service.among_neighbours(scored("code", attacking(body), time_limit_s=1.0, **ADD))
    assert (result.status, result.reward) == (pb.SCORE_STATUS_OK, 0.0)


HARMLESS = {
    "a flood on stdout": "print('x' * 2**20)\nimport sys; sys.stderr.write('y' * 2**20)",
    "a file in its own /tmp": "open('/tmp/mine', 'w').write('x')",
    "threads": "import threading\nt = threading.Thread(target=lambda: 0)\nt.start()\nt.join()",
}


@needs_sandbox
@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS.keys())
async def test_what_stays_in_the_sandbox_is_allowed(service: Service, body: str) -> None:
    result = await service.among_neighbours(scored("code", attacking(body), **ADD))
    assert (result.status, result.reward) == (pb.SCORE_STATUS_OK, 1.0)


@needs_sandbox
async def test_an_item_cannot_read_the_files_of_another(service: Service) -> None:
    write = scored("code", attacking("open('/tmp/secret', 'w').write('mine')\nimport time\ntime.sleep(0.3)"), **ADD)
    read = scored("code", attacking("import time\ntime.sleep(0.1)\nopen('/tmp/secret').read()"), **ADD)
    assert [result.reward for result in await service.score(write, read)] == [1.0, 0.0]


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 2**20)",
        "import sys; sys.exit(0)",
        "print(3); import os; os._exit(1)",
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "print(input() * 10**10)",
    ],
)
async def test_programs_are_judged_by_what_they_print(service: Service, program: str) -> None:
    row: Mapping[str, Any] = {"tests": [{"input": "1 2\n", "output": "3\n"}], "time_limit_s": 1.0}
    right = await service.among_neighbours(scored("code", "print(sum(map(int, input().split())))", **row))
    wrong = await service.among_neighbours(scored("code", program, **row))
    assert right.reward == 1.0
    assert (wrong.status, wrong.reward) in ((pb.SCORE_STATUS_OK, 0.0), (pb.SCORE_STATUS_TIMEOUT, 0.0))


async def test_without_a_sandbox_code_is_refused_and_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same service on a machine without bubblewrap."""
    path = folder / "bare.yaml"
    path.write_text("experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\nreward: {function: code}\n")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert shutil.which("bwrap") is None
    async with run(load_experiment(path), Placement(run_dir=folder)) as running:
        channel = connect(f"127.0.0.1:{running.ports['grpc']}")
        bare = Service(rpc.RewardStub(channel), 0)
        [result] = await bare.score(scored("code", f"open({str(folder / 'ran')!r}, 'w')\n{HONEST}", **ADD))
        status = await bare.stub.GetRewardStatus(pb.GetRewardStatusRequest())
        await channel.close()
    assert result.status == pb.SCORE_STATUS_ERROR
    assert result.message.startswith("model-written code is not run without a sandbox: ")
    assert not (folder / "ran").exists()
    assert "bubblewrap" not in status.isolation
    assert any(missing.startswith("bubblewrap: ") for missing in status.missing_isolation)


async def test_workers_share_one_session_so_that_priorities_count_among_them(service: Service) -> None:
    await service.score(scored("exact", "1", answer="1"))
    [fork_server] = [pid for pid in children_of(os.getpid()) if b"fork_server" in command_of(pid)]
    workers = children_of(fork_server)
    assert workers
    assert {os.getsid(pid) for pid in workers} == {fork_server}


async def test_after_all_attacks_nothing_is_left_behind(service: Service) -> None:
    status = await service.stub.GetRewardStatus(pb.GetRewardStatusRequest())
    assert (status.num_queued, status.num_running, status.num_slow) == (0, 0, 0)
    [fork_server] = [pid for pid in children_of(os.getpid()) if b"fork_server" in command_of(pid)]
    async with asyncio.timeout(30):
        while len(children_of(fork_server)) > SPARE_TIMES * status.num_workers:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
    assert all(b"fork_server" in command_of(pid) for pid in children_of(fork_server))


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
