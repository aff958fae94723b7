"""Pins by name: states that are not evicted before their time is over."""

from __future__ import annotations

import time

from hybrid.lazy_heap import LazyHeap
from hybrid.tree.node import Node, StateLock
from hybrid.tree.tree import Tree


class NamedPins:
    """The pins of a tree, each with a name. Of one name there is one pin: the latest.

    Args:
        tree: the locks are on its nodes.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._locks: dict[str, StateLock] = {}
        self._ends: LazyHeap[str] = LazyHeap()

    def __len__(self) -> int:
        return len(self._locks)

    def put(self, name: str, node: Node, ttl: float) -> None:
        """Pin a node that has a state, and all before it, in place of what the name has pinned.

        Args:
            ttl: seconds from now.
        """
        lock = self._tree.pin(node)
        self.remove(name)
        self._locks[name] = lock
        self._ends.put(name, time.monotonic() + ttl)

    def remove(self, name: str) -> None:
        """End a pin, if there is one of that name."""
        if name in self._ends:
            self._ends.remove(name)
        lock = self._locks.pop(name, None)
        if lock is not None:
            self._tree.unlock(lock)

    def expire(self) -> None:
        """End the pins whose time is over."""
        while (first := self._ends.first) is not None and first[0] <= time.monotonic():
            self.remove(first[1])

    def remove_next_to_expire(self) -> bool:
        """End the pin that would expire first. False if there is none."""
        first = self._ends.first
        if first is not None:
            self.remove(first[1])
        return first is not None
