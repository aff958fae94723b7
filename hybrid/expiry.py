"""Keys with a time at which each ends."""

from __future__ import annotations

import time
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class ExpiryQueue(Generic[K]):
    """Keys, the first to end first; of those that end together the first that came."""

    def __init__(self) -> None:
        self._ends: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # keys that were removed, and former ends, may be in it
        self._num_put = 0

    def put(self, key: K, end: float) -> None:
        """Enter a key that ends at a time of `time.monotonic`, in place of its former end."""
        self._ends[key] = end
        self._num_put += 1
        if len(self._heap) > 2 * len(self._ends) + 64:  # most of them have ended
            self._heap = [entry for entry in self._heap if self._is_present(entry)]
            heapify(self._heap)
        heappush(self._heap, (end, self._num_put, key))

    def remove(self, key: K) -> None:
        """Take out a key, if it is there."""
        self._ends.pop(key, None)

    @property
    def first(self) -> K | None:
        """The key that ends first; None: there is none."""
        while self._heap and not self._is_present(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    @property
    def overdue(self) -> K | None:
        """A key whose time is over; None: there is none."""
        first = self.first if self._ends else None
        return first if first is not None and self._ends[first] <= time.monotonic() else None

    def _is_present(self, entry: tuple[float, int, K]) -> bool:
        end, _, key = entry
        return self._ends.get(key) == end
