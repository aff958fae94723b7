"""Pins by name: states that are not evicted before their time is over."""

from __future__ import annotations

import time
from heapq import heapify, heappop, heappush

from hybrid.tree.node import Node, StateLock
from hybrid.tree.tree import Tree


class NamedPins:
    """The pins of a tree, each with a name. Of one name there is one pin: the latest.

    Args:
        tree: the locks are on its nodes.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._pins: dict[str, tuple[float, StateLock]] = {}
        self._next_to_expire: list[tuple[float, str]] = []  # a heap; pins that have ended may be in it

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, name: str, node: Node, ttl: float) -> None:
        """Pin a node that has a state, and all before it, in place of what the name has pinned.

        Args:
            ttl: seconds from now.
        """
        lock = self._tree.pin(node)
        self.remove(name)
        expires = time.monotonic() + ttl
        self._pins[name] = expires, lock
        heap = self._next_to_expire
        if len(heap) > 2 * len(self._pins) + 64:  # most of them have ended
            heap[:] = [(end, one) for one, (end, _) in self._pins.items()]
            heapify(heap)
        else:
            heappush(heap, (expires, name))

    def remove(self, name: str) -> None:
        """End a pin, if there is one of that name."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._tree.unlock(pin[1])

    def expire(self) -> None:
        """End the pins whose time is over."""
        if self._pins:
            now = time.monotonic()
            while (first := self._first_to_expire()) is not None and self._pins[first][0] <= now:
                self.remove(first)

    def remove_next_to_expire(self) -> bool:
        """End the pin that would expire first. False when there is none."""
        first = self._first_to_expire()
        if first is not None:
            self.remove(first)
        return first is not None

    def _first_to_expire(self) -> str | None:
        heap = self._next_to_expire
        while heap and self._pins.get(heap[0][1], (None,))[0] != heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else None
