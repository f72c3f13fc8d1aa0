"""What `headway up` refuses before it starts anything."""

import socket

from headway.config import ExperimentConfig
from headway.config.machine import find_etcd, model_folder
from headway.errors import InvalidInput


def preflight(config: ExperimentConfig) -> None:
    """Refuse what would fail later: a missing model folder, a port in use, no etcd.

    Raises:
        InvalidInput: With the key, and what to do.
    """
    model_folder("actor.path", config.actor.path)
    port = config.services.controller_http_port
    if port and not _is_free(config.services.host, port):
        raise InvalidInput(
            f"services.controller_http_port: port {port} on {config.services.host} is in use; "
            "end what uses it, or give another (0 takes any free one)"
        )
    if config.cluster.name_resolve.type == "etcd3" and not config.cluster.name_resolve.etcd3_addr:
        find_etcd()


def free_ports(number: int) -> list[int]:
    """Ports that are free now; for programs that cannot bind any free port by themselves."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
