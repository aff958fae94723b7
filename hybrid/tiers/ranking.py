"""Which entries of a tier are dropped first: those of the lowest value per byte.

Values age: every entry starts from the value of what was dropped last (Greedy-Dual), so that one without hits is
dropped in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True, eq=False)
class Entry:
    """What is kept and dropped as a whole.

    Attributes:
        num_bytes: its size.
        since: the value of what was dropped last when it came, or was used last.
        value: per byte, as it was found last.
    """

    num_bytes: int
    since: float
    value: float

    @property
    def rank(self) -> float:
        """It is dropped before those of higher rank."""
        return self.since + self.value


class Ranking(Generic[KeyT]):
    """The entries of a tier, up to a number of bytes. Knows their sizes and values, not their contents.

    Args:
        num_bytes: of all entries together.
        value: of an entry, per byte and at the time of the call. Asked for when an entry comes, and before it goes.

    Attributes:
        num_bytes: as given, or as last limited.
        bytes_used: of the entries.
    """

    def __init__(self, num_bytes: int, value: Callable[[KeyT], float]) -> None:
        self.num_bytes: int = num_bytes
        self.bytes_used: int = 0
        self._value = value
        self._entries: dict[KeyT, Entry] = {}
        self._heap: list[tuple[float, int, KeyT]] = []  # ranks that an entry had before may be in it
        self._order = count()
        self._age = 0.0

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
        """Whether an entry that comes now would be kept: it fits, or what is dropped first is worth less.

        Args:
            value: per byte.
            coming: bytes that were promised to others.
        """
        if num_bytes + coming > self.num_bytes:
            return False
        lowest = self._lowest()
        if self.bytes_used + coming + num_bytes <= self.num_bytes:
            return True
        if lowest is not None and lowest[0] < self._age + value:
            return True
        self._age_by_refusal()
        return False

    def make_free(self, num_bytes: int, value: float) -> list[KeyT] | None:
        """Drop entries of lower rank than one that comes now, so that `num_bytes` fit. None, and nothing is dropped,
        when they do not suffice.

        Args:
            value: of what comes, per byte.

        Returns:
            What was dropped.
        """
        lowest_first: list[tuple[float, int, KeyT]] = []
        free = self.num_bytes - self.bytes_used
        while free < num_bytes:
            lowest = self._lowest_now()
            if lowest is None or lowest[0] >= self._age + value:
                for entry in lowest_first:
                    heappush(self._heap, entry)
                self._age_by_refusal()
                return None
            lowest_first.append(heappop(self._heap))
            free += self._entries[lowest[2]].num_bytes
        for lowest_rank, _, key in lowest_first:
            self._age = max(self._age, lowest_rank)
            self.drop(key)
        return [key for _, _, key in lowest_first]

    def add(self, key: KeyT, num_bytes: int) -> None:
        """An entry is kept from now on. There must be no other of that key."""
        assert key not in self._entries
        entry = self._entries[key] = Entry(num_bytes, self._age, self._value(key))
        self.bytes_used += num_bytes
        self._push(key, entry)

    def touch(self, key: KeyT) -> None:
        """Rank an entry as if it came now."""
        entry = self._entries[key]
        if entry.since != self._age:
            entry.since = self._age
            self._push(key, entry)

    def revalue(self) -> None:
        """Ask for the values of all entries."""
        for key, entry in self._entries.items():
            entry.value = self._value(key)
        self._heap.clear()
        for key, entry in self._entries.items():
            self._push(key, entry)

    def _push(self, key: KeyT, entry: Entry) -> None:
        heappush(self._heap, (entry.rank, next(self._order), key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(one.rank, next(self._order), key) for key, one in self._entries.items()]
            heapify(self._heap)

    def drop(self, key: KeyT) -> bool:
        """Forget an entry. False: it is not there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes_used -= entry.num_bytes
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
        ranked = {key for rank, _, key in self._heap if key in self._entries and self._entries[key].rank == rank}
        if ranked != set(self._entries):
            wrong.append(f"a copy in {name} would never be dropped")
        return wrong

    def _lowest(self) -> tuple[float, int, KeyT] | None:
        """The first element of the heap that is the rank of an entry."""
        while self._heap:
            rank, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.rank == rank:
                return self._heap[0]
            heappop(self._heap)
        return None

    def _lowest_now(self) -> tuple[float, int, KeyT] | None:
        """The same by present values: what others left to an entry when they went has made it worth more."""
        seen = set[KeyT]()
        while (lowest := self._lowest()) is not None and lowest[2] not in seen:
            seen.add(lowest[2])
            heappop(self._heap)
            entry = self._entries[lowest[2]]
            entry.value = self._value(lowest[2])
            self._push(lowest[2], entry)
        return lowest

    def _age_by_refusal(self) -> None:
        """What keeps others out must prove its worth: it ages with every refusal."""
        if self._heap:
            self._age += max(0.0, self._heap[0][0] - self._age) / (len(self._entries) + 1)
