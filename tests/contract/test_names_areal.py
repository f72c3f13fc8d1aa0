"""AReaL's surface means the same over every store: order, errors, names that end at a slash, leases that are kept."""

import asyncio
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from headway.errors import NotFound
from headway.runtime import names_areal
from headway.runtime.names_areal import NameEntryExistsError, NameEntryNotFoundError, NameRecordRepository
from headway.runtime.service import Placement
from headway.testing.etcd import EtcdCluster, running_etcd
from services.name_resolve.app import serve
from services.name_resolve.etcd import EtcdStore
from services.name_resolve.files import FileStore
from services.name_resolve.memory import MemoryStore
from services.name_resolve.store import Store

DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with running_etcd(flags=["--unsafe-no-fsync"]) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["memory", "nfs", "etcd3"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service with a loop and a thread of its own, since the surface blocks."""
    store: Store = MemoryStore()
    if request.param == "nfs":
        store = FileStore(tmp_path_factory.mktemp("names"))
    if request.param == "etcd3":
        store = EtcdStore([request.getfixturevalue("etcd").endpoints])
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve_until_stopped() -> None:
        async with serve(store, Placement()) as running:
            stop = asyncio.Event()
            started.set_result((f"127.0.0.1:{running.ports['grpc']}", asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve_until_stopped()))
    thread.start()
    where, loop, stop = started.result(DEADLINE_S)
    yield where
    loop.call_soon_threadsafe(stop.set)
    thread.join()


@pytest.fixture
def names(address: str) -> Iterator[NameRecordRepository]:
    repository = NameRecordRepository(address)
    yield repository
    repository.close()


@pytest.fixture
def root() -> str:
    return f"exp/{uuid.uuid4().hex}"


def test_a_value_is_read_back_as_text(names: NameRecordRepository, root: str) -> None:
    names.add(f"{root}/port", 4711)
    assert names.get(f"{root}/port") == "4711"
    assert names.get(f"/{root}//port/") == "4711"


def test_a_missing_name_is_an_error_by_its_own_name(names: NameRecordRepository, root: str) -> None:
    with pytest.raises(NameEntryNotFoundError, match="nothing"):
        names.get(f"{root}/nothing")
    with pytest.raises(NameEntryNotFoundError):
        names.delete(f"{root}/nothing")


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced(names: NameRecordRepository, root: str) -> None:
    names.add(f"{root}/a", "1")
    with pytest.raises(NameEntryExistsError):
        names.add(f"{root}/a", "2")
    names.add(f"{root}/a", "2", replace=True)
    assert names.get(f"{root}/a") == "2"


def test_of_many_that_add_one_name_one_succeeds(address: str, root: str) -> None:
    repositories = [NameRecordRepository(address) for _ in range(4)]
    outcomes: list[str] = []

    def add(repository: NameRecordRepository, value: int) -> None:
        try:
            repository.add(f"{root}/one", value)
            outcomes.append("ok")
        except NameEntryExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=add, args=(repository, index)) for index, repository in enumerate(repositories)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["ok", "refused", "refused", "refused"]
    for repository in repositories:
        repository.close()


def test_a_root_ends_at_a_slash_and_everything_comes_in_order(names: NameRecordRepository, root: str) -> None:
    for name, value in (("trial10/x", "no"), ("trial1/b", "2"), ("trial1", "0"), ("trial1/a", "1")):
        names.add(f"{root}/{name}", value)
    assert names.find_subtree(f"{root}/trial1") == [f"{root}/trial1", f"{root}/trial1/a", f"{root}/trial1/b"]
    assert names.get_subtree(f"{root}/trial1") == ["0", "1", "2"]
    names.clear_subtree(f"{root}/trial1")
    assert names.get_subtree(root) == ["no"]


def test_subentries_have_names_of_their_own(names: NameRecordRepository, root: str) -> None:
    added = [names.add_subentry(f"{root}/workers", index) for index in range(3)]
    assert len(set(added)) == 3
    assert sorted(names.get_subtree(f"{root}/workers")) == ["0", "1", "2"]
    assert names.find_subtree(f"{root}/workers") == sorted(added)


def test_reset_deletes_what_this_repository_added_and_was_told_to(
    names: NameRecordRepository, root: str, address: str
) -> None:
    other = NameRecordRepository(address)
    other.add(f"{root}/other", "x")
    names.add(f"{root}/mine", "x")
    names.add(f"{root}/kept", "x", keepalive_ttl=30)
    names.add(f"{root}/stays", "x", delete_on_exit=False)
    names.reset()
    assert names.find_subtree(root) == [f"{root}/other", f"{root}/stays"]
    other.close()
    assert names.find_subtree(root) == [f"{root}/stays"]


def test_waiting_ends_when_the_name_appears_or_time_is_over(names: NameRecordRepository, root: str) -> None:
    with pytest.raises(TimeoutError, match="late"):
        names.wait(f"{root}/late", timeout=0.1)
    adding = threading.Timer(0.05, lambda: names.add(f"{root}/late", "now"))
    adding.start()
    assert names.wait(f"{root}/late", timeout=DEADLINE_S) == "now"
    adding.join()


def test_a_callback_comes_once_when_all_watched_names_are_gone(names: NameRecordRepository, root: str) -> None:
    called = threading.Semaphore(0)
    names.watch_names([f"{root}/a", f"{root}/b"], called.release)
    names.add(f"{root}/a", "x")
    names.add(f"{root}/b", "x")
    names.delete(f"{root}/a")
    assert not called.acquire(timeout=0.1)
    names.delete(f"{root}/b")
    assert called.acquire(timeout=DEADLINE_S)
    assert not called.acquire(timeout=0.1)


def test_a_name_that_was_deleted_is_not_registered_again(names: NameRecordRepository, root: str) -> None:
    names.add(f"{root}/a", "x", keepalive_ttl=3)
    names.delete(f"{root}/a")
    names.add(f"{root}/a", "y", keepalive_ttl=3)
    assert names.get(f"{root}/a") == "y"


OWNER = """
import sys, time
from headway.runtime.names_areal import NameRecordRepository
NameRecordRepository(sys.argv[1]).add(sys.argv[2], "x", keepalive_ttl=3)
print("added", flush=True)
time.sleep(60)
"""


def test_a_name_is_kept_while_its_owner_lives_and_lapses_when_it_dies(
    names: NameRecordRepository, root: str, address: str
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, address, f"{root}/owned"], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "added\n"
        names.add(f"{root}/silent", "x", keepalive_ttl=3)
        names._kept[f"{root}/silent"]._keeper._leases.clear()
        wait_until_gone(names, f"{root}/silent")
        assert names.find_subtree(root) == [f"{root}/owned"]
    finally:
        owner.kill()
        owner.communicate()
    wait_until_gone(names, f"{root}/owned")


def wait_until_gone(names: NameRecordRepository, name: str) -> None:
    gone = threading.Event()
    names.watch_names(name, gone.set)
    assert gone.wait(DEADLINE_S)


def test_the_module_itself_is_a_repository(address: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NAME_RESOLVE", address)
    names_areal.default_repository.cache_clear()
    names_areal.add(f"{root}/a", "x")
    assert names_areal.get(f"{root}/a") == "x"
    names_areal.default_repository().close()
    names_areal.default_repository.cache_clear()
    with pytest.raises(AttributeError, match="nonsense"):
        names_areal.nonsense()


def test_its_errors_are_headway_s_too() -> None:
    assert issubclass(NameEntryNotFoundError, NotFound)
