"""Every store keeps the four promises of services/name_resolve/store.py, so that the service means the same on each."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from headway.testing.etcd import EtcdCluster, running_etcd
from services.name_resolve import files, tree
from services.name_resolve.etcd import EtcdStore, Login, Member
from services.name_resolve.files import FileStore
from services.name_resolve.memory import MemoryStore
from services.name_resolve.store import Changes, CreatedAt, Delete, LeaseLapsed, Put, Store, Unchanged, View

DEADLINE_S = 40.0
Forget = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with running_etcd(flags=["--unsafe-no-fsync"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_store() -> Iterator[Store]:
    """One actor for the module: a Ray cluster takes ten seconds to start."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from services.name_resolve.ray import RayStore

    ray.init(namespace="headway", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield RayStore(f"names-{uuid.uuid4().hex}")
    ray.shutdown()


@pytest.fixture(params=["memory", "nfs", "ray", "etcd3"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    async with make_store(request).open() as opened:
        yield opened


def make_store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "ray":
        return request.getfixturevalue("ray_store")
    if request.param == "nfs":
        return FileStore(request.getfixturevalue("tmp_path") / "names")
    return EtcdStore([request.getfixturevalue("etcd").endpoints])


@pytest.fixture
def forget(request: pytest.FixtureRequest, store: Store) -> Forget:
    """Makes the store forget the changes up to now."""

    async def by_compaction() -> None:
        member = Member(request.getfixturevalue("etcd").endpoints, Login())
        await member.kv.compact((await store.get("none/")).revision)
        await member.channel.close()

    async def by_writing() -> None:
        for _ in range((files if isinstance(store, FileStore) else tree).NUM_REMEMBERED + 1):
            await put(store, "busy/")

    return by_compaction if isinstance(store, EtcdStore) else by_writing


async def next_news(news: AsyncIterator[View | Changes]) -> View | Changes:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(news)


async def put(store: Store, key: str, value: bytes = b"x", lease_id: int = 0) -> int:
    outcome = await store.transact([], [Put(key, value, lease_id)])
    assert outcome.committed
    return outcome.revision


async def test_a_key_is_read_as_it_was_written(store: Store) -> None:
    first = await put(store, "a/b/", b"1")
    second = await put(store, "a/b/", b"2")
    view = await store.get("a/b/")
    assert [(item.key, item.value, item.revision, item.create_revision) for item in view.items] == [
        ("a/b/", b"2", second, first)
    ]
    assert view.revision >= second > first
    assert (await store.get("a/c/")).items == ()


async def test_a_prefix_is_whole_segments_in_the_order_of_the_keys(store: Store) -> None:
    for key in ("r/trial10/x/", "r/trial1/b/", "r/trial1/", "r/trial1/a/", "s/"):
        await put(store, key)
    assert [item.key for item in (await store.below("r/trial1/")).items] == ["r/trial1/", "r/trial1/a/", "r/trial1/b/"]


async def test_a_transaction_happens_whole_or_not_at_all(store: Store) -> None:
    await put(store, "t/a/", b"1")
    refused = await store.transact([Unchanged("t/a/", 0)], [Put("t/b/", b"2"), Delete("t/a/")])
    assert not refused.committed
    assert [item.value for item in refused.found] == [b"1"]
    assert [item.key for item in (await store.below("t/")).items] == ["t/a/"]
    done = await store.transact([Unchanged("t/b/", 0)], [Put("t/b/", b"2"), Delete("t/a/")])
    assert done.committed
    assert done.num_deleted == 1
    assert [item.key for item in (await store.below("t/")).items] == ["t/b/"]


async def test_a_guard_tells_a_key_from_its_successor(store: Store) -> None:
    created = await put(store, "g/", b"1")
    changed = await put(store, "g/", b"2")
    assert not (await store.transact([Unchanged("g/", created)], [Put("h/", b"")])).committed
    assert (await store.transact([Unchanged("g/", changed), CreatedAt("g/", created)], [Put("h/", b"")])).committed
    await store.transact([], [Delete("g/")])
    await put(store, "g/", b"1")
    assert not (await store.transact([CreatedAt("g/", created)], [Put("h/", b"")])).committed


async def test_of_many_that_take_the_same_absent_key_one_succeeds(store: Store) -> None:
    claims = [store.transact([Unchanged("claim/", 0)], [Put("claim/", str(index).encode())]) for index in range(16)]
    outcomes = await asyncio.gather(*claims)
    winners = [index for index, outcome in enumerate(outcomes) if outcome.committed]
    assert len(winners) == 1
    assert (await store.get("claim/")).items[0].value == str(winners[0]).encode()


async def test_reads_that_come_together_are_answered_each(store: Store) -> None:
    for index in range(150):
        await put(store, f"many/{index}/", str(index).encode())
    views = await asyncio.gather(*[store.get(f"many/{index}/") for index in range(151)])
    assert [view.items[0].value for view in views[:150]] == [str(index).encode() for index in range(150)]
    assert views[150].items == ()


async def test_a_prefix_is_deleted_in_one_revision(store: Store) -> None:
    before = [await put(store, key) for key in ("d/a/", "d/b/", "dd/")][-1]
    news = store.watch("d", before)
    assert (await store.transact([], [Delete("d/", below=True)])).num_deleted == 2
    seen = await next_news(news)
    assert isinstance(seen, Changes)
    assert [(change.key, change.item) for change in seen.changes] == [("d/a/", None), ("d/b/", None)]
    await news.aclose()


async def test_a_watch_sees_every_change_once_and_in_order(store: Store) -> None:
    start = await put(store, "w/0/")
    news = store.watch("w/", start)
    writer = asyncio.create_task(write_all(store, [f"w/{index}/" for index in range(1, 60)]))
    seen: list[str] = []
    revisions: list[int] = []
    while len(seen) < 59:
        batch = await next_news(news)
        assert isinstance(batch, Changes)
        seen += [change.key for change in batch.changes]
        revisions += [change.revision for change in batch.changes]
        assert batch.revision == revisions[-1]
    assert seen == [f"w/{index}/" for index in range(1, 60)]
    assert revisions == sorted(revisions)
    await writer
    await news.aclose()


async def write_all(store: Store, keys: list[str]) -> None:
    for key in keys:
        await put(store, key)


async def test_a_watch_that_resumes_misses_nothing(store: Store) -> None:
    start = await put(store, "resume/0/")
    await write_all(store, ["resume/1/", "other/", "resume/2/"])
    await store.transact([], [Delete("resume/1/")])
    news = store.watch("resume/", start)
    seen: list[tuple[str, bool]] = []
    while len(seen) < 3:
        batch = await next_news(news)
        seen += [(change.key, change.item is not None) for change in batch.changes]
    assert seen == [("resume/1/", True), ("resume/2/", True), ("resume/1/", False)]
    await news.aclose()


async def test_a_watch_from_before_what_is_remembered_begins_with_a_view(store: Store, forget: Forget) -> None:
    start = await put(store, "c/gone/")
    await store.transact([], [Delete("c/gone/")])
    await put(store, "c/there/")
    await forget()
    news = store.watch("c/", start)
    view = await next_news(news)
    assert isinstance(view, View)
    assert [item.key for item in view.items] == ["c/there/"]
    await put(store, "c/next/")
    changes = await next_news(news)
    assert [change.key for change in changes.changes] == ["c/next/"]
    await news.aclose()


async def test_a_lease_lapses_with_its_keys_when_nobody_keeps_it(store: Store) -> None:
    lease = await store.grant(1.0)
    start = await put(store, "l/a/", lease_id=lease)
    await store.transact([], [Put("l/b/", b"", lease), Put("l/c/", b"")])
    news = store.watch("l/", start)
    gone: set[str] = set()
    while gone < {"l/a/", "l/b/"}:
        batch = await next_news(news)
        gone |= {change.key for change in batch.changes if change.item is None}
    assert [item.key for item in (await store.below("l/")).items] == ["l/c/"]
    with pytest.raises(LeaseLapsed):
        await store.keep_alive(lease)
    with pytest.raises(LeaseLapsed):
        await store.transact([], [Put("l/d/", b"", lease)])
    await news.aclose()


async def test_a_lease_that_is_kept_outlives_its_time(store: Store) -> None:
    kept, silent = await store.grant(2.0), await store.grant(2.0)
    start = await put(store, "k/kept/", lease_id=kept)
    await put(store, "k/silent/", lease_id=silent)
    ttl_s = await store.keep_alive(kept)
    keeper = asyncio.create_task(keep(store, kept, ttl_s / 10))
    news = store.watch("k/silent/", start)
    batch = await next_news(news)
    while batch.changes[-1].item is not None:
        batch = await next_news(news)
    assert [item.key for item in (await store.below("k/")).items] == ["k/kept/"]
    keeper.cancel()
    await news.aclose()


async def keep(store: Store, lease_id: int, every_s: float) -> None:
    while True:
        await store.keep_alive(lease_id)
        await asyncio.sleep(every_s)


async def test_a_revoked_lease_takes_its_keys_at_once(store: Store) -> None:
    lease = await store.grant(60.0)
    await put(store, "v/", lease_id=lease)
    await store.revoke(lease)
    assert (await store.get("v/")).items == ()
    await store.revoke(lease)


async def test_a_key_that_moves_to_another_lease_leaves_the_first(store: Store) -> None:
    first, second = await store.grant(60.0), await store.grant(60.0)
    await put(store, "move/", lease_id=first)
    await put(store, "move/", lease_id=second)
    await store.revoke(first)
    assert (await store.get("move/")).items[0].lease_id == second
    await store.revoke(second)
    assert (await store.get("move/")).items == ()
