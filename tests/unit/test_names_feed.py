"""A feed hands every change to every follower, in order and once, however far the feed or the follower lags behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from headway.errors import Unavailable
from services.name_resolve.feed import Feed
from services.name_resolve.keys import ROOT
from services.name_resolve.store import Changes, Delete, News, Put, View
from services.name_resolve.tree import Tree

DEADLINE_S = 20.0


class LaggingStore:
    """A tree whose one watch shows changes only when the test lets them through."""

    def __init__(self) -> None:
        self.tree = Tree()
        self._shown: asyncio.Queue[View | Changes] = asyncio.Queue()
        self._told = self.tree.revision

    def put(self, key: str) -> int:
        return self.tree.transact([], [Put(ROOT + key, b"")]).revision

    def show(self) -> None:
        """Let the watch see everything up to now."""
        news = self.tree.changes_after(self._told, "")
        if news is not None:
            self._told = news.revision
            self._shown.put_nowait(news)

    def replace(self) -> None:
        """An emptier store in the place of this one."""
        self.tree, self._told = Tree(), 1
        self._shown.put_nowait(self.tree.below(""))

    async def get(self, *keys: str) -> View:
        return self.tree.get(*keys)

    async def below(self, prefix: str) -> View:
        return self.tree.below(prefix)

    async def watch(self, prefix: str, after: int) -> News:
        while True:
            yield await self._shown.get()


@asynccontextmanager
async def running(store: LaggingStore, num_remembered: int = 100) -> AsyncIterator[Feed]:
    feed = Feed(store, num_remembered)  # type: ignore[arg-type]
    task = asyncio.create_task(feed.run())
    async with asyncio.timeout(DEADLINE_S):
        yield feed
    task.cancel()


def keys_of(news: View | Changes) -> list[str]:
    items = news.items if isinstance(news, View) else news.changes
    return [item.key.removeprefix(ROOT) for item in items]


async def test_a_view_that_is_ahead_of_the_feed_is_not_followed_by_what_it_had() -> None:
    store = LaggingStore()
    async with running(store) as feed, aclosing(feed.follow(ROOT, 0)) as follower:
        store.put("a/")
        assert keys_of(await anext(follower)) == ["a/"]
        store.put("b/")
        store.show()
        assert keys_of(await anext(follower)) == ["b/"]


async def test_a_follower_that_resumes_ahead_of_the_feed_waits_for_what_is_new() -> None:
    store = LaggingStore()
    async with running(store) as feed, aclosing(feed.follow(ROOT, store.put("a/"))) as follower:
        store.show()
        store.put("b/")
        store.show()
        assert keys_of(await anext(follower)) == ["b/"]


async def test_followers_of_different_prefixes_see_their_own_in_order() -> None:
    store = LaggingStore()
    async with (
        running(store) as feed,
        aclosing(feed.follow(ROOT + "x/", 0)) as x,
        aclosing(feed.follow(ROOT, 0)) as all_,
    ):
        assert keys_of(await anext(x)) == keys_of(await anext(all_)) == []
        for key in ("x/1/", "y/1/", "x/2/"):
            store.put(key)
        store.show()
        assert keys_of(await anext(x)) == ["x/1/", "x/2/"]
        assert keys_of(await anext(all_)) == ["x/1/", "y/1/", "x/2/"]


async def test_a_follower_that_fell_too_far_behind_starts_again_from_a_view() -> None:
    store = LaggingStore()
    async with running(store, num_remembered=2) as feed:
        async with aclosing(feed.follow(ROOT, 0)) as slow, aclosing(feed.follow(ROOT, 0)) as quick:
            await anext(slow)
            await anext(quick)
            for index in range(5):
                store.put(f"{index}/")
                store.show()
                assert keys_of(await anext(quick)) == [f"{index}/"]
            news = await anext(slow)
            assert isinstance(news, View)
            assert keys_of(news) == [f"{index}/" for index in range(5)]
            store.put("later/")
            store.show()
            assert keys_of(await anext(slow)) == ["later/"]


async def test_changes_that_the_feed_missed_are_told_as_a_view_to_those_who_missed_them_too() -> None:
    store = LaggingStore()
    async with running(store) as feed, aclosing(feed.follow(ROOT, 0)) as early:
        await anext(early)
        store.put("a/")
        store.tree.forgotten = store.tree.revision
        store.tree.transact([], [Delete(ROOT + "a/")])
        store.put("b/")
        async with aclosing(feed.follow(ROOT, 0)) as late:
            assert keys_of(await anext(late)) == ["b/"]
            store.show()
            assert isinstance(await anext(early), View)
            store.put("c/")
            store.show()
            assert keys_of(await anext(early)) == ["c/"]
            assert keys_of(await anext(late)) == ["c/"]


async def test_another_store_in_the_old_one_s_place_is_seen_as_it_is() -> None:
    store = LaggingStore()
    for index in range(5):
        store.put(f"{index}/")
    async with running(store) as feed, aclosing(feed.follow(ROOT, 0)) as follower:
        assert len(keys_of(await anext(follower))) == 5
        store.show()
        store.replace()
        assert keys_of(await anext(follower)) == []
        store.put("new/")
        store.show()
        assert keys_of(await anext(follower)) == ["new/"]


async def test_a_closed_feed_ends_its_followers() -> None:
    async with running(LaggingStore()) as feed, aclosing(feed.follow(ROOT, 0)) as follower:
        await anext(follower)
        feed.close()
        with pytest.raises(Unavailable):
            await anext(follower)
