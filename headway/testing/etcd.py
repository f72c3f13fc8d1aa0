"""Real etcd for tests: one node or a cluster, on free ports, that can be killed, frozen, restarted and filled.

Guarantee: when the `with` block is left no process of it runs and its data is deleted.
"""

import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc

from headway.config.machine import find_etcd
from headway.errors import Unavailable

READY_TIMEOUT_S = 30.0
PROBE_S = 1.0
RETRY_S = 0.05


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@cache
def forgets_when_killed() -> bool:
    """Whether the etcd of this machine may lose an acknowledged write when it is killed, as 3.5.0 to 3.5.2 do.

    https://github.com/etcd-io/etcd/issues/13766
    """
    told = subprocess.run([find_etcd(), "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(number) for number in re.findall(r"\d+", told)[:3])
    return (3, 5, 0) <= version < (3, 5, 3)


def etcd_command(name: str, data: Path, client_url: str, peer_url: str, cluster: str = "") -> list[str]:
    """The words that start a node which listens where it advertises; `cluster` is "name=peer_url,..."."""
    return [
        find_etcd(),
        f"--name={name}",
        f"--data-dir={data}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster={cluster or f'{name}={peer_url}'}",
        "--logger=zap",
        "--log-level=warn",
    ]


@dataclass
class EtcdNode:
    """One etcd process; its data outlives it."""

    name: str
    data: Path
    client_port: int
    peer_url: str
    flags: Sequence[str] = ()
    credentials: grpc.ChannelCredentials | None = None
    """Of a client, where the flags set TLS up."""
    cluster: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Start the process, or start it again on the same data; `wait_ready` waits for it."""
        url = f"{'https' if self.credentials else 'http'}://{self.endpoint}"
        command = [*etcd_command(self.name, self.data, url, self.peer_url, self.cluster), *self.flags]
        with (self.data.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and reap."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: the process keeps its sockets and does nothing."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the node answers on its port.

        Raises:
            Unavailable: It ended, or did not answer in time; the message has its last lines.
        """
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if self._running().poll() is not None or time.monotonic() > deadline:
                log = (self.data.parent / f"{self.name}.log").read_text(errors="replace")
                raise Unavailable(f"etcd {self.name} is not ready; its last lines:\n{log[-2000:]}")
            time.sleep(RETRY_S)

    def _answers(self) -> bool:
        """etcd completes a gRPC handshake once it has joined the cluster and a leader is known."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.credentials is None:
            channel = grpc.insecure_channel(self.endpoint, options)
        else:
            channel = grpc.secure_channel(self.endpoint, self.credentials, options)
        with channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=PROBE_S)
            except grpc.FutureTimeoutError:
                return False
        return True

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "start() first"
        return self.process

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            if number != signal.SIGKILL:
                self.process.send_signal(signal.SIGCONT)
            self.process.wait(timeout=READY_TIMEOUT_S)


@dataclass
class EtcdCluster:
    """The nodes of one cluster."""

    nodes: list[EtcdNode] = field(default_factory=list)

    @property
    def endpoints(self) -> str:
        """What `cluster.name_resolve.etcd3_addr` takes."""
        return ",".join(node.endpoint for node in self.nodes)


@contextmanager
def running_etcd(
    size: int = 1, flags: Sequence[str] = (), credentials: grpc.ChannelCredentials | None = None
) -> Iterator[EtcdCluster]:
    """Run a cluster of `size` nodes.

    Args:
        size: Number of nodes.
        flags: Further command line flags of each node, e.g. "--quota-backend-bytes=16777216".
        credentials: Of a client, where the flags set TLS up.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="headway-etcd-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        peers = {f"n{index}": f"http://127.0.0.1:{free_port()}" for index in range(size)}
        cluster = ",".join(f"{name}={url}" for name, url in peers.items())
        nodes = [
            EtcdNode(name, folder / name, free_port(), url, flags, credentials, cluster) for name, url in peers.items()
        ]
        for node in nodes:
            node.start()
            stack.callback(node.kill)
        for node in nodes:
            node.wait_ready()
        yield EtcdCluster(nodes)
