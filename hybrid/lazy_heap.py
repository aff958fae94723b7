"""A heap whose items may be removed, or get another key, wherever they are in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

Entry = tuple[float, int, Item]
"""Key, number, item. Numbers differ, so that items are not compared."""

MIN_DEAD = 16
"""Dead entries that are kept, at least."""


class LazyHeap(Generic[Item]):
    """Items by their keys, the smallest first, of equals the one that was put first.

    What is removed, and what has another key now, leaves a dead entry in the heap, until that comes first or there are
    many. `put` and `remove` cost the logarithm of the number of items, on average; a walk what it visits.

    Attributes:
        entries: the present entry of each item. To read.
    """

    def __init__(self) -> None:
        self.entries: dict[Item, Entry[Item]] = {}
        self._heap: list[Entry[Item]] = []
        self._num_put = self._num_dead = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, item: object) -> bool:
        return item in self.entries

    def __iter__(self) -> Iterator[Item]:
        return iter(self.entries)

    def put(self, item: Item, key: float) -> None:
        """Add an item, or change its key."""
        self._num_put += 1
        entry = key, self._num_put, item
        heappush(self._heap, entry)
        self._num_dead += item in self.entries
        self.entries[item] = entry  # not before: what is interrupted in between has changed nothing
        if self._num_dead > MIN_DEAD:
            self._drop_dead()

    def remove(self, item: Item) -> float:
        """Remove an item, and return the key that it had.

        Raises:
            KeyError: it is not in the heap.
        """
        key = self.entries.pop(item)[0]
        self._num_dead += 1
        if self._num_dead > MIN_DEAD or not self.entries:
            self._drop_dead()
        return key

    @property
    def first(self) -> tuple[float, Item] | None:
        """The smallest key and its item; None if the heap is empty."""
        heap, entries = self._heap, self.entries
        while heap:
            key, _, item = entry = heap[0]
            if item in entries and entries[item] is entry:
                return key, item
            heappop(heap)
            self._num_dead -= 1
        return None

    def walk(self) -> Iterator[tuple[float, Item]]:
        """Keys and items in order. Items may be removed meanwhile, and are passed over then; none may be put."""
        first, heap = self.first, self._heap
        front = [(heap[0], 0)] if first is not None else []
        while front:
            entry, place = heappop(front)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(front, (heap[child], child))
            if self.entries.get(entry[2]) is entry:
                yield entry[0], entry[2]

    def _drop_dead(self) -> None:
        """Make a heap without dead entries where there are many, or nothing else: another one, as a walk may be under
        way."""
        if not self.entries or self._num_dead > len(self.entries) // 8 + MIN_DEAD:
            heap = [*self.entries.values()]
            heapify(heap)
            self._heap, self._num_dead = heap, 0
