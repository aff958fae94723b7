"""The numbered log of one cache's changes."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from hybrid.events.change import Change

MAX_CHANGES = 1 << 16
"""Changes that a feed remembers unless it is asked for others: a reader that is further behind takes a snapshot."""


class FeedSnapshot(NamedTuple):
    """All that a cache has, as births, and the number of the last change before.

    Attributes:
        feed_id: of the feed.
        number: changes after this one are to be applied on top.
        changes: one birth for each run of pages and each checkpoint.
    """

    feed_id: str
    number: int
    changes: list[Change]


class Feed:
    """The changes of a cache since it was subscribed to, numbered from 1 on. Made by `HybridCache.subscribe`.

    The cache's thread adds changes, and that which writes to its disk; any thread may read them.

    Args:
        take: makes a snapshot's changes; in the thread of the cache.
        leave: called with the feed when it is closed.
        limit: changes that are remembered.
        with_values: checkpoints that come have their ranks.

    Attributes:
        with_values: as given.
        feed_id: no other feed has it, so that a reader sees when the cache is another one.
        number: of the last change.
        on_change: called in the thread that adds a change, after the first since `since` was called; None: nothing is.
            Must not raise, and must not call the cache.
    """

    def __init__(
        self,
        take: Callable[[], Iterator[Change]],
        leave: Callable[[Feed], None],
        limit: int = MAX_CHANGES,
        with_values: bool = False,
    ) -> None:
        self.with_values: bool = with_values
        self.feed_id: str = secrets.token_hex(8)
        self.number: int = 0
        self.on_change: Callable[[], None] | None = None
        self._take = take
        self._leave = leave
        self._changes: deque[tuple[Any, ...]] = deque(maxlen=limit)  # plain tuples, at which the collector looks once
        self._lock = threading.Lock()
        self._is_told = False

    def add(self, change: Change) -> None:
        """Number a change, and remember it."""
        with self._lock:
            self._changes.append(tuple(change))
            self.number += 1
        notify = self.on_change
        if notify is not None and not self._is_told:
            self._is_told = True
            notify()

    def since(self, number: int) -> list[Change] | None:
        """The changes after that of a number; None: some of them are not remembered, and a snapshot is needed."""
        with self._lock:
            self._is_told = False
            missing = self.number - number
            if missing == 0:
                return []
            if not 0 < missing <= len(self._changes):
                return None
            found = list(islice(self._changes, len(self._changes) - missing, None))
        return [*map(Change._make, found)]

    def snapshot(self) -> FeedSnapshot:
        """Take all that the cache has now. In the thread of the cache; takes about a microsecond a page.

        Raises:
            OwnershipError: another thread owns the cache.
        """
        return FeedSnapshot(self.feed_id, self.number, list(self._take()))

    def close(self) -> None:
        """End the feed: the cache does not spend time on it any more. In the thread of the cache."""
        self._leave(self)
