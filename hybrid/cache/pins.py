"""Pins: prefixes that are protected from eviction until they are unpinned or expire."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from hybrid.cache.allocator import Allocator
from hybrid.checks import number, shown
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.key import Key, check_key
from hybrid.lazy_heap import LazyHeap
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Node, StateLock
from hybrid.tree.tree import Tree

MAX_PINNED = 0.5
"""The part of the memory that pins may protect."""

PINNED_TOO_MUCH = (
    "with this pin over half of the memory would be pinned; unpin something, or give the cache more memory"
)


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that is protected from eviction.

    It is a name for what the cache holds: a copy is the same pin, and one from another process has ended.

    Attributes:
        num_tokens: length of the prefix; the checkpoint at its end is protected too.
        expires: when it ends by itself, on the clock of `time.monotonic`.
    """

    num_tokens: int
    expires: float

    def __copy__(self) -> Pin:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Pin:
        return self


def check_pin(call: str, pin: object) -> None:
    """Check that a pin is one. Raises ArgumentError: it is not."""
    if not isinstance(pin, Pin):
        raise ArgumentError(f"{call}: pin must be a hybrid.Pin, as `pin` returns it; got {shown(pin)}")


class Pins:
    """The pins of a cache, in the order in which they were made.

    A pin holds a lock on the checkpoint where it ends, and so on its pages, from `add` to `remove`.

    Args:
        tree: the locks are on its nodes.
        memory: its capacities limit what can be pinned.
        allocator: takes and releases the locks.
    """

    def __init__(self, tree: Tree, memory: CacheMemory, allocator: Allocator) -> None:
        self._tree = tree
        self._memory = memory
        self._allocator = allocator
        self._locks: dict[Pin, StateLock] = {}
        self._ends: LazyHeap[Pin] = LazyHeap()

    def __len__(self) -> int:
        return len(self._locks)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._locks)

    def __contains__(self, pin: object) -> bool:
        return pin in self._locks

    def add(self, key: Key, ttl: float, num_tokens: int | None = None) -> Pin | None:
        """Pin what is usable of a key. None when nothing is.

        Args:
            num_tokens: pin what is usable of this many of its first tokens; None: of all.

        Raises:
            ArgumentError: `ttl` is not a positive number.
            MemoryBudgetError: more than half of the memory would be pinned. Nothing was changed.
        """
        check_key("pin", key)
        if not number("pin: ttl, in seconds,", ttl) > 0:
            raise ArgumentError(f"pin: ttl must be a positive number of seconds, got {ttl!r}")
        self.expire()
        node = self._tree.peek(key, len(key) if num_tokens is None else num_tokens).checkpoint
        if node is None:
            return None
        pin = Pin(node.end, time.monotonic() + ttl)
        self._locks[pin] = self._allocator.pin(node)
        self._ends.put(pin, pin.expires)
        if self._pinned_share() > MAX_PINNED:
            self.remove(pin)
            raise MemoryBudgetError(PINNED_TOO_MUCH)
        return pin

    def extend(self, pin: Pin, key: Key) -> None:
        """Have a pin protect what is usable of a key by now. A pin that has ended stays so.

        Raises:
            MemoryBudgetError: more than half of the memory would be pinned. The pin is as it was.
        """
        check_key("extend_pin", key)
        check_pin("extend_pin", pin)
        node = self._tree.peek(key, len(key)).checkpoint
        if pin not in self._locks or node is None:
            return
        lock = self._allocator.pin(node)
        if self._pinned_share() > MAX_PINNED:
            self._allocator.unlock(lock)
            raise MemoryBudgetError(PINNED_TOO_MUCH)
        former, self._locks[pin], pin.num_tokens = self._locks[pin], lock, node.end
        self._allocator.unlock(former)

    def remove(self, pin: Pin) -> None:
        """End a pin. One that has ended stays so.

        Raises:
            ArgumentError: it is not a pin.
        """
        check_pin("unpin", pin)
        if pin in self._ends:
            self._ends.remove(pin)
        lock = self._locks.pop(pin, None)
        if lock is not None:
            self._allocator.unlock(lock)

    def remove_on(self, nodes: Set[Node]) -> None:
        """End the pins that protect these nodes."""
        for pin in [pin for pin, lock in self._locks.items() if lock.node in nodes]:
            self.remove(pin)

    def renew(self, pin: Pin, expires: float) -> None:
        """Have a pin end at a time of `time.monotonic`, unless it ends later or has ended."""
        if pin in self._locks and expires > pin.expires:
            pin.expires = expires
            self._ends.put(pin, expires)

    def remove_next_to_expire(self) -> bool:
        """End the pin that would expire first. False when there is none."""
        first = self._ends.first
        if first is not None:
            self.remove(first[1])
        return first is not None

    def expire(self) -> None:
        """End the pins whose time is over."""
        while (first := self._ends.first) is not None and first[0] <= time.monotonic():
            self.remove(first[1])

    @property
    def locks(self) -> Mapping[Pin, StateLock]:
        """The lock that each pin holds."""
        return self._locks

    def _pinned_share(self) -> float:
        """Compute the part of the memory that pins protect: of the scarcer kind where pages and states do not share
        it."""
        memory, locks = self._memory, self._tree.locks
        pages = locks.num_pinned_pages / memory.pages.capacity
        checkpoints = locks.num_pinned_checkpoints / memory.checkpoints.capacity
        return max(pages, checkpoints) if memory.arena is None else pages + checkpoints
