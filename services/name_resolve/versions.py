"""Published versions: a compare-and-swap with fencing, in the store.

    publish(run, version, manifest, token)

    reads    together the run's version V, and the last leadership L of `run`/leader/trainer
    refuses  unless token = L's token (or, where nobody ever led, >= V's token), and version > V
    writes   if neither V nor L has changed meanwhile; else from the start

Guarantee: versions of a run only grow, so that one (term, step) names one manifest for ever; and a leader's publication
takes effect only while no later leader has been elected, however long the call was under way.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, NotFound, StaleVersion
from services.name_resolve.feed import Feed
from services.name_resolve.keys import (
    TERMS,
    TRAINER_OFFICE,
    VERSIONS,
    Leadership,
    Published,
    clean,
    key_of,
    leadership_of,
    published_of,
    to_bytes,
)
from services.name_resolve.store import Item, Put, Store, Unchanged, View


class Versions:
    """The versions of every run in a store."""

    def __init__(self, store: Store, feed: Feed, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._feed = feed
        self._wall_clock = wall_clock

    async def publish(self, run: str, version: PolicyVersion, manifest_sha256: str, fencing_token: int) -> int:
        """Make a version the current one; the revision. The same publication again is no error.

        Raises:
            StaleVersion: A later version or a later leader exists; the message names it.
        """
        _check(version, manifest_sha256)
        key, term_key = key_of(VERSIONS, clean(run)), key_of(TERMS, f"{clean(run)}/{TRAINER_OFFICE}")
        wanted = (version, manifest_sha256, fencing_token)
        while True:
            items = {item.key: item for item in (await self._store.get(key, term_key)).items}
            current = published_of(items[key]) if key in items else None
            if current and (current.version, current.manifest_sha256, current.fencing_token) == wanted:
                return items[key].revision
            leadership = leadership_of(items[term_key]) if term_key in items else None
            _check_token(run, fencing_token, version, leadership, current)
            _check_newer(run, version, manifest_sha256, current)
            record = self._record(version, manifest_sha256, fencing_token, current)
            guards = [Unchanged(key, items[key].revision if key in items else 0) for key in (key, term_key)]
            outcome = await self._store.transact(guards, [Put(key, to_bytes(record))])
            if outcome.committed:
                return outcome.revision

    def _record(self, version: PolicyVersion, manifest: str, token: int, current: Published | None) -> Published:
        sequence = current.sequence + 1 if current else 1
        return Published(version.term, version.step, manifest, token, self._wall_clock(), sequence)

    async def get(self, run: str) -> Item:
        """The item of a run's version.

        Raises:
            NotFound: Nothing is published yet.
        """
        view = await self._store.get(key_of(VERSIONS, clean(run)))
        if not view.items:
            raise NotFound(f"no version of {run} is published")
        return view.items[0]

    async def below(self, prefix: str) -> View:
        return await self._store.below(key_of(VERSIONS, clean(prefix, may_be_empty=True)))

    async def watch(self, run: str, after: int) -> AsyncGenerator[Item, None]:
        """The current version if there is one, then each newer one, as long as the store remembers them."""
        key = key_of(VERSIONS, clean(run))
        async with aclosing(self._feed.follow(key, after)) as changes:
            async for news in changes:
                items = news.items if isinstance(news, View) else [change.item for change in news.changes]
                for item in items:
                    if item is not None and item.key == key:
                        yield item


def _check(version: PolicyVersion, manifest_sha256: str) -> None:
    if version.term < 0 or version.step < 0:
        raise InvalidInput(f"{version.term}.{version.step} is not a version")
    if len(manifest_sha256) != 64 or not set(manifest_sha256) <= set("0123456789abcdef"):
        raise InvalidInput(f"{manifest_sha256[:70]!r} is not a sha256 in hex")


def _check_token(
    run: str, token: int, version: PolicyVersion, leadership: Leadership | None, current: Published | None
) -> None:
    """Refuse all but the last elected leader; where nobody was ever elected, all that are older than the publisher."""
    if leadership is None:
        if current and token < current.fencing_token:
            raise StaleVersion(
                f"{run}: token {token} is older than {current.fencing_token}, which published {current.version.label}"
            )
        return
    if token != leadership.fencing_token:
        at = f"; the current version is {current.version.label}" if current else ""
        raise StaleVersion(
            f"{run}: token {token} does not lead: {leadership.candidate} does, in term {leadership.term} "
            f"with token {leadership.fencing_token}{at}"
        )
    if version.term != leadership.term:
        raise InvalidInput(f"{run}: {version.label} is not of term {leadership.term}, which its publisher leads")


def _check_newer(run: str, version: PolicyVersion, manifest_sha256: str, current: Published | None) -> None:
    if current is None or version > current.version:
        return
    if version == current.version and manifest_sha256 != current.manifest_sha256:
        raise StaleVersion(f"{run}: {version.label} is published with another manifest, {current.manifest_sha256}")
    raise StaleVersion(f"{run}: {version.label} is not newer than the current version, {current.version.label}")
