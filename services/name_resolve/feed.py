"""Everything that changes in the store, watched once and handed to many.

    Store.watch(everything) -> [remember, forget the oldest] -> each follower's own position -> gRPC streams

A hundred watchers cost the store one watch. A follower has no queue of its own, only a position in what is remembered,
so a slow one costs nothing: it falls behind, and when what it needs is forgotten it starts again from a view.

Guarantee: a follower that starts after revision r sees every change after r below its prefix, in order, each once; or a
view and then every change after that.
"""

import asyncio
from collections import deque
from contextlib import aclosing

from headway.errors import Unavailable
from services.name_resolve.keys import ROOT
from services.name_resolve.store import Changes, News, Store, View

NUM_REMEMBERED = 4096
MAX_PREFIXES = 4
"""Of which the changes in one batch are kept sorted out."""


class Batch:
    """Changes that came together, sorted out once for all who follow the same prefix."""

    def __init__(self, news: Changes) -> None:
        self.revision = news.revision
        self._news = news
        self._first = news.changes[0].revision
        self._below: dict[str, Changes] = {}

    def below(self, prefix: str, after: int) -> Changes:
        """The changes below a prefix and after a revision."""
        if after >= self._first:
            return self._sorted_out(prefix, after)
        found = self._below.get(prefix)
        if found is None:
            found = self._sorted_out(prefix, after)
            if len(self._below) < MAX_PREFIXES:
                self._below[prefix] = found
        return found

    def _sorted_out(self, prefix: str, after: int) -> Changes:
        matching = [c for c in self._news.changes if c.revision > after and c.key.startswith(prefix)]
        return Changes(tuple(matching), self.revision)


class Feed:
    """One process's view of the store's changes."""

    def __init__(self, store: Store, num_remembered: int = NUM_REMEMBERED) -> None:
        self._store = store
        self._news: deque[Batch] = deque(maxlen=num_remembered)
        self._num_seen = 0
        self._known_after = 0
        """What is remembered is complete after this revision."""
        self._newest = 0
        self._num_resets = 0
        """How often the store turned out to be another one than before."""
        self._started = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def newest(self) -> int:
        """The newest revision that was seen."""
        return self._newest

    @property
    def num_resets(self) -> int:
        """How often the store turned out to be another one than before."""
        return self._num_resets

    def close(self) -> None:
        """End every follower with `Unavailable`, so that callers move to another replica."""
        self._is_closed = True
        self._started.set()
        self._changed.set()

    async def run(self) -> None:
        """Follow the store for ever.

        consumes: the store's changes   waits for: the next one; unblocked by: any write
        produces: the followers' news   waits for: nothing
        """
        newest = (await self._store.get(ROOT)).revision
        self._known_after = max(0, newest - NUM_REMEMBERED)  # followers of a former process go on where they were
        self._started.set()
        async for news in self._store.watch(ROOT, self._known_after):
            self._take(news)
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self, prefix: str, after: int) -> News:
        """Changes below a prefix after a revision; with `after` 0, or where they are forgotten, a view first."""
        await self._started.wait()
        if after and after > (await self._store.get(ROOT)).revision:
            after = 0  # from a store that was replaced by an emptier one
        is_forgotten = 0 < after < self._known_after
        source = self._store.watch(prefix, after) if is_forgotten else self._follow_from(prefix, after or -1)
        async with aclosing(source) as changes:
            async for news in changes:
                yield news

    async def _follow_from(self, prefix: str, after: int) -> News:
        """Waits for: the next change below the prefix; unblocked by: `run`."""
        position, num_resets = self._position_after(after), self._num_resets
        while not self._is_closed:
            if after < self._known_after or num_resets != self._num_resets:
                num_resets = self._num_resets
                view = await self._store.below(prefix)
                after, position = view.revision, self._position_after(view.revision)
                is_another_store = after < self._known_after  # which `run` has yet to find out
                yield view
                if is_another_store:
                    await self._changed.wait()
            elif position < self._num_seen - len(self._news):
                position = self._position_after(after)  # what it had not yet seen is after a view that it need not see
            elif position == self._num_seen:
                await self._changed.wait()
            else:
                news = self._news[position - self._num_seen].below(prefix, after)
                position, after = position + 1, max(after, news.revision)
                if news.changes:
                    yield news
        raise Unavailable("this replica of name-resolve is closing")

    def _position_after(self, revision: int) -> int:
        """Index, in all news ever seen, of the first that is not wholly before or at a revision."""
        num_later = 0
        for news in reversed(self._news):
            if news.revision <= revision:
                break
            num_later += 1
        return self._num_seen - num_later

    def _take(self, news: View | Changes) -> None:
        """Remember changes. A view says that those before it are gone; an older one, that the store is another one."""
        if isinstance(news, View):
            self._num_resets += news.revision < self._newest
            self._known_after = self._newest = news.revision
            self._news.clear()
            return
        if len(self._news) == self._news.maxlen:
            self._known_after = self._news[0].revision
        self._newest = news.revision
        self._news.append(Batch(news))
        self._num_seen += 1
