"""The trajectories of one run, for whoever asks: the index, kept up to date beside the caller, and the dumps.

A folder without an index is read in a thread of its own; whoever asks meanwhile gets what is known, and how much is
not.
"""

import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from headway.errors import NotFound
from headway.view.folder import INDEX, RunFolder
from headway.view.groups import Filters, Order, count, find, groups_of_task
from headway.view.index import Index
from headway.view.models import GroupPage, TaskGroups, Trajectory
from headway.view.pieces import Pieces, find_tokenizer
from headway.view.trajectories import Address, trajectory

NOT_DUMPED = "Samples are not written to files. Set rollout.dump_to_file: true to see them here."
NONE_YET = "No group has been finished yet."
REFRESH_S = 1.0
"""Files are looked at again after so long."""
PATIENCE_S = 0.5
"""How long an answer waits for what is new."""
log = logging.getLogger(__name__)


class Store:
    """Answers about one run; any thread may ask.

    Args:
        folder: Where the run's files are.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "index of trajectories")
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._reading: Future[None] | None = None
        self._read_at = -REFRESH_S
        self._hears_of_writes = False
        self._has_read_all = False
        self._has_told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let a catch-up in hand end."""
        self._thread.shutdown(cancel_futures=True)

    def groups(self, filters: Filters, order: Order, limit: int, cursor: str | None) -> GroupPage:
        """A page of groups.

        Raises:
            InvalidInput: The cursor does not belong to this order.
        """
        index, is_read = self._refreshed()
        if index is None:
            note = NONE_YET if self._folder.is_dumping else NOT_DUMPED
            return GroupPage(groups=[], total=0, next=None, unread_bytes=0, note=note)
        with index.open() as connection:
            found, next_cursor = find(connection, filters, order, limit, cursor)
            total = count(connection, filters)
        unread_bytes = 0 if is_read else index.unread_bytes()
        return GroupPage(groups=found, total=total, next=next_cursor, unread_bytes=unread_bytes, note="")

    def task(self, task_id: str) -> TaskGroups:
        """All groups of a task.

        Raises:
            NotFound: There is none.
        """
        with self._known().open() as connection:
            found = groups_of_task(connection, task_id)
        if not found:
            raise NotFound(f"task {task_id} is in no dump")
        return TaskGroups(task_id=task_id, groups=found)

    def trajectory(self, address: Address) -> Trajectory:
        """One sample with its tokens.

        Raises:
            NotFound: There is none.
        """
        pieces = Pieces(find_tokenizer(self._folder.tokenizer, self._folder.weights))
        with self._known().open() as connection:
            return trajectory(connection, self._folder.dumps, pieces, address)

    def written(self, paths: Iterable[Path]) -> None:
        """Files of samples have grown: take them in now, in this thread. A failure costs the index, not the run."""
        try:
            with self._lock:
                index, self._hears_of_writes = self._opened(), True
            if index is not None:
                index.catch_up_with(paths)
        except (OSError, sqlite3.Error) as error:
            if not self._has_told:
                log.warning("the index of trajectories falls behind: %s", error)
            self._has_told = True

    def _known(self) -> Index:
        index, _ = self._refreshed()
        if index is None:
            raise NotFound(NONE_YET if self._folder.is_dumping else NOT_DUMPED)
        return index

    def _refreshed(self) -> tuple[Index | None, bool]:
        """The index, and whether it holds everything; None: there is nothing to index."""
        with self._lock:
            index = self._opened()
            if index is None:
                return None, True
            if self._reading is None and time.monotonic() >= self._read_at + REFRESH_S:
                self._reading = self._thread.submit(self._read, index)
            reading = self._reading
        if reading is None:
            return index, True
        wait([reading], PATIENCE_S)
        if reading.done():
            self._has_read(reading)
        return index, reading.done()

    def _read(self, index: Index) -> None:
        """Look through the whole folder, unless whoever writes to it tells of every write."""
        if self._has_read_all and self._hears_of_writes:
            index.catch_up_with(())
        else:
            index.catch_up()
        self._has_read_all = True

    def _has_read(self, reading: Future[None]) -> None:
        with self._lock:
            if self._reading is reading:
                self._reading, self._read_at = None, time.monotonic()
        reading.result()

    def _opened(self) -> Index | None:
        if self._index is None and any(root.is_dir() for root in self._folder.dumps.values()):
            self._index = Index(self._place(), self._folder.dumps)
        return self._index

    def _place(self) -> Path:
        """Beside the dumps; elsewhere where these may only be read."""
        rollouts = self._folder.rollouts
        parent = next(path for path in (rollouts, *rollouts.parents) if path.is_dir())
        if os.access(parent, os.W_OK):
            return rollouts / INDEX
        return Path(tempfile.mkdtemp(prefix="headway-view-")) / INDEX
