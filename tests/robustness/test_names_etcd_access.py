"""How etcd is reached: TLS with client certificates, user and password, a DNS name. What is wrong is named."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from headway.config.cluster import NameResolveConfig
from headway.errors import InvalidInput, Refused, Unavailable
from headway.runtime.names import NameClient, Put
from headway.runtime.service import Placement
from headway.testing.etcd import EtcdCluster, running_etcd
from services.name_resolve.app import make_store, serve
from services.name_resolve.etcd import EtcdStore, Login, Member
from services.name_resolve.keys import ROOT

RUN = "exp/trial"
DEADLINE_S = 90.0


@asynccontextmanager
async def client_of(config: NameResolveConfig) -> AsyncIterator[NameClient]:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(make_store(config), Placement()) as running,
        NameClient(f"127.0.0.1:{running.ports['grpc']}", RUN) as names,
    ):
        yield names


async def check_it_works(names: NameClient) -> None:
    """A name under a lease is registered, seen by a watch, kept, and gone."""
    async with aclosing(names.watch("a")) as events:
        await anext(events)
        registration = await names.register("a/b", "c", ttl_s=2.0)
        event = await anext(events)
        assert isinstance(event, Put)
        assert event.entry.value == "c"
        await registration.close()
        await anext(events)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of an authority, a server on 127.0.0.1 and localhost, a client, and another authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("name-resolve")
    blobs = {
        "ca": authority.cert_pem,
        "server": server.cert_chain_pems[0],
        "server_key": server.private_key_pem,
        "client": client.cert_chain_pems[0],
        "client_key": client.private_key_pem,
        "stranger": stranger.cert_pem,
    }
    for name, blob in blobs.items():
        blob.write_to_path(str(folder / f"{name}.pem"))
    return {name: str(folder / f"{name}.pem") for name in blobs}


def read(file: str) -> bytes:
    return Path(file).read_bytes()


@pytest.fixture(scope="module")
def secure_etcd(certificates: dict[str, str]) -> Iterator[EtcdCluster]:
    flags = [
        f"--cert-file={certificates['server']}",
        f"--key-file={certificates['server_key']}",
        f"--trusted-ca-file={certificates['ca']}",
        "--client-cert-auth",
    ]
    ca, key, chain = (read(certificates[name]) for name in ("ca", "client_key", "client"))
    with running_etcd(flags=flags, credentials=grpc.ssl_channel_credentials(ca, key, chain)) as cluster:
        yield cluster


async def test_tls_with_a_client_certificate_works(secure_etcd: EtcdCluster, certificates: dict[str, str]) -> None:
    config = NameResolveConfig(
        etcd3_addr=secure_etcd.endpoints,
        etcd3_ca_file=certificates["ca"],
        etcd3_cert_file=certificates["client"],
        etcd3_key_file=certificates["client_key"],
    )
    async with client_of(config) as names:
        await check_it_works(names)


async def test_without_a_client_certificate_etcd_is_not_reached(
    secure_etcd: EtcdCluster, certificates: dict[str, str]
) -> None:
    ca = read(certificates["ca"])
    with pytest.raises(Unavailable, match=secure_etcd.endpoints):
        async with EtcdStore([secure_etcd.endpoints], Login(ca=ca), start_timeout_s=1.0).open():
            pass


async def test_a_server_of_another_authority_is_not_trusted(
    secure_etcd: EtcdCluster, certificates: dict[str, str]
) -> None:
    stranger = read(certificates["stranger"])
    with pytest.raises(Unavailable, match=secure_etcd.endpoints):
        async with EtcdStore([secure_etcd.endpoints], Login(ca=stranger), start_timeout_s=1.0).open():
            pass


def test_a_missing_certificate_file_is_named() -> None:
    with pytest.raises(InvalidInput, match="not-there"):
        make_store(NameResolveConfig(etcd3_addr="127.0.0.1:1", etcd3_ca_file="not-there.pem"))


@pytest.fixture
async def etcd_with_users() -> AsyncIterator[EtcdCluster]:
    """An etcd whose user `headway` may touch the keys of name-resolve and nothing else."""
    with running_etcd() as cluster:
        await enable_users(cluster.endpoints)
        yield cluster


async def enable_users(endpoint: str) -> None:
    from etcd3aio import PermissionType, prefix_range_end

    member = Member(endpoint, Login())
    auth = member.auth
    await auth.role_add("names")
    await auth.role_grant_permission("names", ROOT, prefix_range_end(ROOT), perm_type=PermissionType.READWRITE)
    for user, role in (("root", "root"), ("headway", "names")):
        await auth.user_add(user, f"{user}-secret")
        await auth.user_grant_role(user, role)
    await auth.auth_enable()
    await member.channel.close()


async def test_a_user_with_rights_on_its_keys_alone_works_also_after_a_restart(
    etcd_with_users: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_ETCD_PASSWORD", "headway-secret")
    config = NameResolveConfig(etcd3_addr=etcd_with_users.endpoints, etcd3_user="headway")
    async with client_of(config) as names:
        await check_it_works(names)
        node = etcd_with_users.nodes[0]
        node.kill()  # which makes every token worthless
        node.start()
        await asyncio.to_thread(node.wait_ready)
        await check_it_works(names)


@pytest.mark.parametrize(("user", "password"), [("headway", "wrong"), ("nobody", "x"), (None, None)])
async def test_a_wrong_user_is_refused(etcd_with_users: EtcdCluster, user: str | None, password: str | None) -> None:
    config = NameResolveConfig(etcd3_addr=etcd_with_users.endpoints, etcd3_user=user, etcd3_password=password)
    with pytest.raises(Refused, match="user"):
        async with make_store(config).open():
            pass


async def test_a_dns_name_is_an_endpoint_and_one_of_several_that_answers_is_enough() -> None:
    with running_etcd() as cluster:
        named = f"localhost:{cluster.nodes[0].client_port}"
        async with client_of(NameResolveConfig(etcd3_addr=f"nowhere.invalid:2379,{named}")) as names:
            await check_it_works(names)
