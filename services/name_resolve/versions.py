"""Published versions: a compare-and-swap with fencing, in the store.

    publish(run, version, manifest, token)

    knows    the run's version V, and the last leadership L of `run`/leader/trainer
    refuses  unless token = L's token (or, where nobody ever led, >= V's token), and version > V
    writes   if neither V nor L has changed meanwhile; else from the start, knowing better

Guarantee: versions of a run only grow, so that one (term, step) names one manifest for ever; and a leader's publication
takes effect only while no later leader has been elected, however long the call was under way.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError, InvalidInput, NotFound, StaleVersion
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
from services.name_resolve.store import Guard, Item, Put, Store, Unchanged, View


@dataclass(frozen=True)
class Known:
    """What was seen at one moment of a run's version and of its last leadership."""

    run: str
    items: dict[str, Item]

    @property
    def key(self) -> str:
        return key_of(VERSIONS, self.run)

    @property
    def term_key(self) -> str:
        return key_of(TERMS, f"{self.run}/{TRAINER_OFFICE}")

    def published(self) -> Published | None:
        return published_of(self.items[self.key]) if self.key in self.items else None

    def leadership(self) -> Leadership | None:
        return leadership_of(self.items[self.term_key]) if self.term_key in self.items else None

    def guards(self) -> list[Guard]:
        """Hold while nothing has changed since."""
        return [
            Unchanged(key, self.items[key].revision if key in self.items else 0) for key in (self.key, self.term_key)
        ]

    def after(self, value: bytes, revision: int) -> "Known":
        """What is known after a version was written."""
        return Known(self.run, {**self.items, self.key: Item(self.key, value, revision, revision)})


class Versions:
    """The versions of every run in a store."""

    def __init__(self, store: Store, feed: Feed, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._feed = feed
        self._wall_clock = wall_clock
        self._recent = Known("", {})
        """After the last publication here: the next one need not read; the guards notice if it should have."""

    async def publish(self, run: str, version: PolicyVersion, manifest_sha256: str, fencing_token: int) -> int:
        """Make a version the current one; the revision. The same publication again is no error.

        Raises:
            StaleVersion: A later version or a later leader exists; the message names it.
        """
        _check(version, manifest_sha256)
        run = clean(run)
        wanted = (version, manifest_sha256, fencing_token)
        known = self._recent if self._recent.run == run else await self._read(run)
        while True:
            current, leadership = known.published(), known.leadership()
            if current and (current.version, current.manifest_sha256, current.fencing_token) == wanted:
                return known.items[known.key].revision
            try:
                _check_token(run, fencing_token, version, leadership, current)
                _check_newer(run, version, manifest_sha256, current)
            except HeadwayError:
                if known is not self._recent:
                    raise
                known = await self._read(run)
                continue
            value = to_bytes(self._record(version, manifest_sha256, fencing_token, current))
            outcome = await self._store.transact(known.guards(), [Put(known.key, value)])
            if outcome.committed:
                self._recent = known.after(value, outcome.revision)
                return outcome.revision
            known = Known(run, {item.key: item for item in outcome.found})

    async def _read(self, run: str) -> "Known":
        known = Known(run, {})
        return Known(run, {item.key: item for item in (await self._store.get(known.key, known.term_key)).items})

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
