"""Name-resolve as a process: one store, one feed of its changes, one gRPC server. Stateless; run as many as wanted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headway.config import ExperimentConfig
from headway.config.cluster import NameResolveConfig
from headway.errors import InvalidInput
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.metrics import registry
from headway.runtime.metrics_http import metrics_app, serve_app
from headway.runtime.metrics_table import NAMES
from headway.runtime.service import Placement, Running
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.v1.name_resolve_pb2_grpc import add_NameResolveServicer_to_server
from services.name_resolve.feed import Feed
from services.name_resolve.grpc_api import NameResolveApi
from services.name_resolve.metrics import names_metrics
from services.name_resolve.store import Store

SERVICE = "headway.v1.NameResolve"


@asynccontextmanager
async def run(config: ExperimentConfig, placement: Placement) -> AsyncIterator[Running]:
    """Serve names from the configured store until the block is left."""
    async with serve(make_store(config.cluster.name_resolve), placement, config.run_name) as running:
        yield running


@asynccontextmanager
async def serve(made: Store, placement: Placement, run_name: str = "") -> AsyncIterator[Running]:
    """Serve names from a store."""
    async with made.open() as store, Supervisor() as supervisor:
        feed = Feed(store)
        supervisor.start("feed", feed.run())
        waits = Waits()
        api = NameResolveApi(store, feed, supervisor, waits)
        metrics = metrics_app(registry(NAMES, run_name, waits, lambda: names_metrics(feed, api)))

        async with (
            serve_app(metrics, placement.host, placement.http_port) as http_port,
            serve_grpc(
                placement.host,
                placement.grpc_port,
                lambda server: add_NameResolveServicer_to_server(api, server),
                [SERVICE],
            ) as server,
        ):
            try:
                yield Running(supervisor, {"grpc": server.port, "http": http_port})
            finally:
                feed.close()
                await api.close()


def make_store(config: NameResolveConfig) -> Store:
    """The store that the experiment file asks for. Only its own libraries are imported."""
    if config.type == "etcd3":
        return _etcd_store(config)
    if config.type == "nfs":
        from services.name_resolve.files import FileStore

        return FileStore(Path(config.nfs_record_root))
    if config.type == "ray":
        from services.name_resolve.ray import RayStore

        return RayStore(config.ray_actor_name)
    from services.name_resolve.memory import MemoryStore

    return MemoryStore()


def _etcd_store(config: NameResolveConfig) -> Store:
    from services.name_resolve.etcd import EtcdStore, Login

    if not config.etcd3_addr:
        raise InvalidInput("cluster.name_resolve.etcd3_addr is missing: host:port[,host:port] of etcd")
    endpoints = [address.strip() for address in config.etcd3_addr.split(",")]
    login = Login(
        user=config.etcd3_user or "",
        password=config.password() or "",
        ca=_bytes_of(config.etcd3_ca_file),
        certificate=_bytes_of(config.etcd3_cert_file),
        key=_bytes_of(config.etcd3_key_file),
    )
    return EtcdStore(endpoints, login)


def _bytes_of(file: str | None) -> bytes | None:
    if not file:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from error
