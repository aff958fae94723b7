"""A priority queue whose items can be removed, and visited in order without taking them out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

Entry = tuple[int, int, Item]
"""Key, arrival, item. Arrivals differ, so that items are not compared."""

MIN_DEAD = 16
"""Entries without an item that are kept, at least."""


class PriorityQueue(Generic[Item]):
    """Items by integer keys, the smallest first, of equals the one that came first.

    `put` and `remove` cost the logarithm of the number of items, on average; a visit what it visits.
    """

    def __init__(self) -> None:
        self._entries: dict[Item, Entry[Item]] = {}
        self._heap: list[Entry[Item]] = []  # entries, and dead ones, whose item was removed or has another key now
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def put(self, item: Item, key: int) -> None:
        """Add an item, or change its key."""
        self._num_put += 1
        arrival = self._entries[item][1] if item in self._entries else self._num_put
        entry = key, arrival, item
        self._entries[item] = entry
        heappush(self._heap, entry)
        self._bury()

    def remove(self, item: Item) -> None:
        """Remove an item.

        Raises:
            KeyError: it is not in the queue.
        """
        del self._entries[item]
        self._bury()

    def visit(self) -> Iterator[tuple[int, Item]]:
        """Keys and items in order. Items may be removed meanwhile, and are not visited then; others may not be put."""
        heap = self._heap
        while heap and self._is_dead(heap[0]):
            heappop(heap)
        front = [(entry, 0) for entry in heap[:1]]
        while front:
            entry, place = heappop(front)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(front, (heap[child], child))
            if not self._is_dead(entry):
                yield entry[0], entry[2]

    def _is_dead(self, entry: Entry[Item]) -> bool:
        return self._entries.get(entry[2]) is not entry

    def _bury(self) -> None:
        """Make a heap without dead entries when there are many: another one, as a visit may be under way."""
        if len(self._heap) > len(self._entries) * 9 // 8 + MIN_DEAD:
            heap = [*self._entries.values()]
            heapify(heap)
            self._heap = heap
