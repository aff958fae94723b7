"""Which entries of a tier are dropped first.

What is kept is what saves the most time per byte: the probability of a hit times the time that a hit saves. The
probability is learned for groups of copies, from how many of them were stored and how many were used. Values age: every
entry starts from the value of what was dropped last (Greedy-Dual), so that one without hits is dropped in the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

HALVED_AFTER = 4096
"""The counts of a group are halved when it has this many copies: what was learned long ago counts less."""

KeyT = TypeVar("KeyT", bound=Hashable)


class Worth(NamedTuple):
    """What a copy may save.

    Attributes:
        group: copies of a group have the same probability of a hit.
        seconds: time that a hit saves.
    """

    group: str
    seconds: float


@dataclass(slots=True, eq=False)
class Entry:
    """Copies that are kept and dropped together.

    Attributes:
        num_bytes: of all of them.
        worths: of each.
        rank: it is dropped before those of higher rank.
    """

    num_bytes: int
    worths: Sequence[Worth]
    rank: float


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
        self._heap: list[tuple[float, int, KeyT]] = []  # ranks that an entry had before may be in it
        self._order = count()
        self._age = 0.0
        self._groups: dict[str, list[float]] = {}  # stored, used

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

    def rank(self, num_bytes: int, worths: Iterable[Worth]) -> float:
        """The rank of an entry that comes now."""
        value = sum(self._probability(worth.group) * worth.seconds for worth in worths)
        return self._age + value / max(1, num_bytes)

    def has_room(self, num_bytes: int, rank: float, coming: int = 0) -> bool:
        """Whether an entry would be kept: it fits, or what is dropped first is worth less.

        Args:
            coming: bytes that were promised to others.
        """
        if num_bytes + coming > self.num_bytes:
            return False
        lowest = self._lowest()
        if self.bytes_used + coming + num_bytes <= self.num_bytes or (lowest is not None and lowest[0] < rank):
            return True
        self._age_by_refusal()
        return False

    def make_free(self, num_bytes: int, rank: float) -> list[KeyT] | None:
        """Drop entries of lower rank, so that `num_bytes` fit. None, and nothing is dropped, when they do not suffice.

        Returns:
            What was dropped.
        """
        lowest_first: list[tuple[float, int, KeyT]] = []
        free = self.num_bytes - self.bytes_used
        while free < num_bytes:
            lowest = self._lowest()
            if lowest is None or lowest[0] >= rank:
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

    def add(self, key: KeyT, num_bytes: int, worths: Sequence[Worth], rank: float) -> None:
        """An entry is kept from now on. There must be no other of that key."""
        assert key not in self._entries
        self._entries[key] = Entry(num_bytes, worths, rank)
        heappush(self._heap, (rank, next(self._order), key))
        self.bytes_used += num_bytes
        for worth in worths:
            self.learn(worth.group, 1, 0)

    def touch(self, key: KeyT) -> None:
        """Rank an entry as if it came now."""
        entry = self._entries[key]
        rank = self.rank(entry.num_bytes, entry.worths)
        if rank != entry.rank:
            entry.rank = rank
            heappush(self._heap, (rank, next(self._order), key))
            if len(self._heap) > 4 * len(self._entries) + 64:
                self._heap = [(one.rank, next(self._order), key) for key, one in self._entries.items()]
                heapify(self._heap)

    def drop(self, key: KeyT) -> bool:
        """Forget an entry. False: it is not there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes_used -= entry.num_bytes
        return entry is not None

    def clear(self) -> None:
        """Forget all entries. What was learned stays."""
        self._entries.clear()
        self._heap.clear()
        self.bytes_used = 0

    def learn(self, group: str, stored: int, used: int) -> None:
        """Copies of a group were stored, or used."""
        counts = self._groups.setdefault(group, [0.0, 0.0])
        counts[0] += stored
        counts[1] += used
        if counts[0] > HALVED_AFTER:
            counts[0] /= 2
            counts[1] /= 2

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

    def _age_by_refusal(self) -> None:
        """What keeps others out must prove its worth: it ages with every refusal."""
        if self._heap:
            self._age += max(0.0, self._heap[0][0] - self._age) / (len(self._entries) + 1)

    def _probability(self, group: str) -> float:
        stored, used = self._groups.get(group, (0.0, 0.0))
        return (used + 0.5) / (stored + 1.0)
