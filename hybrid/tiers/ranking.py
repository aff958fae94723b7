"""Which entries of a tier are dropped first: those of the lowest value per byte.

Values change by themselves, with age, and asking for one takes time: an entry keeps the value that was found last, and
`refresh` asks again for those of which something has happened, and for a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from random import Random
from typing import Generic, TypeVar

from hybrid.tiers.sampled import Sampled

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True, eq=False)
class Entry:
    """What is kept and dropped as a whole.

    Attributes:
        num_bytes: its size.
        value: per byte, as it was found last.
    """

    num_bytes: int
    value: float


class Ranking(Generic[KeyT]):
    """The entries of a tier, up to a number of bytes. Knows their sizes and values, not their contents.

    Args:
        num_bytes: of all entries together.

    Attributes:
        num_bytes: as given, or as last limited.
        bytes_used: of the entries.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes: int = num_bytes
        self.bytes_used: int = 0
        self._entries: dict[KeyT, Entry] = {}
        self._all: Sampled[KeyT] = Sampled(Random(0))
        self._changed: dict[KeyT, None] = {}  # in the order in which it happened
        self._heap: list[tuple[float, int, KeyT]] = []  # values that an entry had before may be in it
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> Iterable[KeyT]:
        """Of all entries."""
        return self._entries.keys()

    def limit(self, num_bytes: int) -> None:
        """Have room for so much from now on. What is there stays until something takes its place."""
        self.num_bytes = num_bytes

    def has_room(self, num_bytes: int, value: float, coming: int = 0) -> bool:
        """Whether an entry would be kept: it fits, or what is dropped first is worth less.

        Args:
            value: per byte.
            coming: bytes that were promised to others.
        """
        if num_bytes + coming > self.num_bytes:
            return False
        lowest = self._lowest()
        return self.bytes_used + coming + num_bytes <= self.num_bytes or (lowest is not None and lowest[0] < value)

    def make_free(self, num_bytes: int, value: float) -> list[KeyT] | None:
        """Drop entries of lower value, so that `num_bytes` fit. None, and nothing is dropped, when they do not suffice.

        Args:
            value: of what comes, per byte.

        Returns:
            What was dropped.
        """
        lowest_first: list[tuple[float, int, KeyT]] = []
        free = self.num_bytes - self.bytes_used
        while free < num_bytes:
            lowest = self._lowest()
            if lowest is None or lowest[0] >= value:
                for entry in lowest_first:
                    heappush(self._heap, entry)
                return None
            lowest_first.append(heappop(self._heap))
            free += self._entries[lowest[2]].num_bytes
        for _, _, key in lowest_first:
            self.drop(key)
        return [key for _, _, key in lowest_first]

    def add(self, key: KeyT, num_bytes: int, value: float | None) -> None:
        """An entry is kept from now on. There must be no other of that key.

        Args:
            value: per byte; None: it is not known, and the entry is not dropped before it is.
        """
        assert key not in self._entries
        entry = self._entries[key] = Entry(num_bytes, math.inf if value is None else value)
        self._all.add(key)
        self.bytes_used += num_bytes
        self._push(key, entry)
        if value is None:
            self._changed[key] = None

    def changed(self, key: KeyT) -> None:
        """Something has happened to an entry: it may be worth more, or less."""
        self._changed[key] = None

    def refresh(self, number: int, value: Callable[[KeyT], float]) -> None:
        """Ask for values again: of up to `number` entries of which something has happened, of a sample of as many, and
        of the one that is dropped first.

        Args:
            value: of an entry, per byte.
        """
        lowest = self._lowest()
        keys = dict.fromkeys([*islice(self._changed, number), *self._all.sample(number)])
        for key in [*keys, *([lowest[2]] if lowest is not None else ())]:
            self._changed.pop(key, None)
            entry = self._entries[key]
            found = value(key)
            if found != entry.value:
                entry.value = found
                self._push(key, entry)

    def _push(self, key: KeyT, entry: Entry) -> None:
        heappush(self._heap, (entry.value, next(self._order), key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(one.value, next(self._order), key) for key, one in self._entries.items()]
            heapify(self._heap)

    def drop(self, key: KeyT) -> bool:
        """Forget an entry. False: it is not there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes_used -= entry.num_bytes
            self._all.discard(key)
            self._changed.pop(key, None)
        return entry is not None

    def violations(self, name: str) -> list[str]:
        """What is wrong with its bookkeeping, for the audit.

        Args:
            name: of the tier.
        """
        wrong = []
        held = sum(entry.num_bytes for entry in self._entries.values())
        if held != self.bytes_used:
            wrong.append(f"{name} counts {self.bytes_used} bytes and holds {held}")
        ranked = {key for value, _, key in self._heap if key in self._entries and self._entries[key].value == value}
        if ranked != set(self._entries):
            wrong.append(f"a copy in {name} would never be dropped")
        if {*self._all} != set(self._entries) or not self._changed.keys() <= self._entries.keys():
            wrong.append(f"{name} asks for values of what is not there")
        return wrong + self._all.violations(name)

    def _lowest(self) -> tuple[float, int, KeyT] | None:
        """The first element of the heap that is the value of an entry."""
        while self._heap:
            value, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.value == value:
                return self._heap[0]
            heappop(self._heap)
        return None
