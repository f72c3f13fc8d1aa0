"""Run a command with a Kubernetes control plane of its own: `cluster.py COMMAND...`, or `--fetch` to prepare only.

etcd, kube-apiserver and kube-controller-manager run on loopback, on ports that are free, in a folder that goes again
with them; KUBECONFIG names the cluster to the command, whose exit code is returned. There is no node: pods are made and
stay pending. Where KUBECONFIG names a cluster already, the command gets that one. Where none can be had, the reason is
printed and the command runs all the same.

The programs are those of HEADWAY_KUBERNETES (a folder), or are built from Debian's source package, once. etcd is that
of the virtual environment.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headway.config.machine import find_etcd

TOOLS = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headway" / "kubernetes"
PROGRAMS = ("kube-apiserver", "kube-controller-manager")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


class Unavailable(Exception):
    """No control plane can run here; the message is the reason."""


def programs(names: Sequence[str] = PROGRAMS) -> Path:
    """The folder of Kubernetes' programs; they are built where they are not.

    Raises:
        Unavailable: They cannot be had.
    """
    folder = Path(os.environ.get("HEADWAY_KUBERNETES", CACHE))
    if all((folder / name).exists() for name in names):
        return folder
    if "HEADWAY_KUBERNETES" in os.environ:
        raise Unavailable(f"HEADWAY_KUBERNETES={folder} has not all of {', '.join(names)}")
    if shutil.which("apt-get") is None:
        raise Unavailable("there is no apt-get to fetch Kubernetes with; name its programs by HEADWAY_KUBERNETES")
    print(f"building {', '.join(names)} into {folder}: some minutes, once", flush=True)
    ended = subprocess.run(
        [TOOLS / "kubernetes_build.sh", folder, *names], stderr=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode != 0:
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise Unavailable(f"Kubernetes could not be built: {last[0]}")
    return folder


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def write_secrets(folder: Path, server: str) -> Path:
    """A key for tokens of service accounts, a token for us, and a kubeconfig with it; the kubeconfig's path."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "accounts.key").write_bytes(key.private_bytes(*private))
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@contextmanager
def process(folder: Path, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose log is in the folder, and which is ended."""
    name = Path(words[0]).name
    with (folder / f"{name}.log").open("wb") as log:
        running = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def wait_until_ready(folder: Path, server: str, apiserver: subprocess.Popen[bytes]) -> None:
    """Wait until the API server says that it is ready.

    Raises:
        Unavailable: It ended, or is not ready in time.
    """
    token = (folder / "tokens.csv").read_text().partition(",")[0]
    request = urllib.request.Request(f"{server}/readyz", headers={"Authorization": f"Bearer {token}"})
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and apiserver.poll() is None:
        try:
            context = ssl._create_unverified_context()  # its certificate is its own, on loopback
            with urllib.request.urlopen(request, timeout=5, context=context):
                return
        except OSError:
            time.sleep(0.2)
    last = (folder / "kube-apiserver.log").read_text().splitlines()[-1:]
    raise Unavailable(f"kube-apiserver does not get ready: {' '.join(last)}")


@contextmanager
def control_plane(folder: Path, found: Path) -> Iterator[Path]:
    """etcd, the API server and the controllers with all that they write in a folder; the kubeconfig's path."""
    store, peer, secure, controllers = free_ports(4)
    server, keys = f"https://127.0.0.1:{secure}", folder / "accounts.key"
    kubeconfig = write_secrets(folder, server)
    with ExitStack() as running:
        running.enter_context(
            process(
                folder,
                find_etcd(),
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls=http://127.0.0.1:{store}",
                f"--advertise-client-urls=http://127.0.0.1:{store}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
                "--unsafe-no-fsync",
            )
        )
        apiserver = running.enter_context(
            process(
                folder,
                found / "kube-apiserver",
                f"--etcd-servers=http://127.0.0.1:{store}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={secure}",
                "--endpoint-reconciler-type=none",
                "--service-cluster-ip-range=10.96.0.0/16",
                f"--cert-dir={folder / 'certificates'}",
                f"--service-account-key-file={keys}",
                f"--service-account-signing-key-file={keys}",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--authorization-mode=RBAC",
                f"--token-auth-file={folder / 'tokens.csv'}",
            )
        )
        wait_until_ready(folder, server, apiserver)
        running.enter_context(
            process(
                folder,
                found / "kube-controller-manager",
                f"--kubeconfig={kubeconfig}",
                f"--service-account-private-key-file={keys}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={controllers}",
                "--port=0",
                f"--cert-dir={folder / 'certificates'}",
            )
        )
        yield kubeconfig


def run(command: Sequence[str]) -> int:
    """Run the command with a cluster, or without; its exit code."""
    if os.environ.get("KUBECONFIG"):
        return subprocess.run(command, check=False).returncode
    with ExitStack() as stack:
        environment = dict(os.environ)
        try:
            found = programs()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-cluster-")))
            environment["KUBECONFIG"] = str(stack.enter_context(control_plane(folder, found)))
        except Unavailable as reason:
            print(f"skipped: a cluster of its own: {reason}", flush=True)
        return subprocess.run(command, check=False, env=environment).returncode


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments != ["--fetch"]:
        return run(arguments)
    try:
        print(programs())
    except Unavailable as reason:
        print(f"skipped: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
