"""Copies of pages and checkpoints in host memory, by the digests of their prefixes.

What is kept is what saves the most time per byte: the probability of a hit times the time that a hit saves. The
probability is learned for groups of copies, from how many of them were stored and how many were used. Values age: every
copy starts from the value of what was dropped last (Greedy-Dual), so that a copy without hits is dropped in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

Name = tuple[str, bytes]
"""Of a copy: "page" or "checkpoint", and the digest of its prefix."""

HALVED_AFTER = 4096
"""The counts of a group are halved when it has this many copies: what was learned long ago counts less."""


@dataclass(slots=True, eq=False)
class Copy:
    """A copy.

    Attributes:
        contents: its bytes.
        group: copies of a group have the same probability of a hit.
        seconds: time that a hit saves.
        rank: it is dropped before those of higher rank.
        note: what the owner of the tier needs to restore it.
    """

    contents: bytes
    group: Hashable
    seconds: float
    rank: float
    note: Any = None


class HostTier:
    """Copies in host memory, up to a number of bytes.

    Args:
        num_bytes: of all copies together.

    Attributes:
        num_bytes: as given.
        bytes_used: of the copies.
        bytes_offered, bytes_written: of what was evicted from the device, and of what was copied of it.
        num_hits: copies that were used.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes: int = num_bytes
        self.bytes_used: int = 0
        self.bytes_offered: int = 0
        self.bytes_written: int = 0
        self.num_hits: int = 0
        self._copies: dict[Name, Copy] = {}
        self._num_checkpoints = 0
        self._heap: list[tuple[float, int, Name]] = []  # ranks that a copy had before may be in it
        self._order = count()
        self._age = 0.0
        self._groups: dict[Hashable, list[float]] = {}  # stored, used

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, name: object) -> bool:
        return name in self._copies

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that it holds."""
        return self._num_checkpoints

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self._copies) - self._num_checkpoints

    def offer(
        self, name: Name, num_bytes: int, read: Callable[[], bytes], group: Hashable, seconds: float, note: Any = None
    ) -> bool:
        """Keep a copy of what leaves the device, if it is worth more than what would have to be dropped for it. One
        that is there is not written again.

        Args:
            num_bytes: of the copy, about.
            read: reads the contents; not called when they are not kept.
            group: see `Copy`.
            seconds: time that a hit saves.

        Returns:
            Whether there is a copy now.
        """
        self.bytes_offered += num_bytes
        known = self._copies.get(name)
        if known is not None:
            known.note = note
            self._rank(name, known)
            return True
        if seconds <= 0 or num_bytes > self.num_bytes:
            return False
        rank = self._age + self._probability(group) * seconds / max(1, num_bytes)
        if not self._make_free(num_bytes, rank):
            return False
        copy = Copy(read(), group, seconds, rank, note)
        while self.bytes_used + len(copy.contents) > self.num_bytes and self._drop_lowest():
            pass
        self._copies[name] = copy
        heappush(self._heap, (rank, next(self._order), name))
        self.bytes_used += len(copy.contents)
        self.bytes_written += len(copy.contents)
        self._num_checkpoints += name[0] == "checkpoint"
        self._count(group, 1, 0)
        return True

    def names(self) -> Iterable[Name]:
        """Of all copies."""
        return self._copies.keys()

    def get(self, name: Name) -> Copy | None:
        """A copy; None: there is none. Not counted as a use."""
        return self._copies.get(name)

    def used(self, name: Name) -> None:
        """A copy was used: it is worth more, and so are others of its group."""
        copy = self._copies.get(name)
        self.num_hits += 1
        if copy is not None:
            self._count(copy.group, 0, 1)
            self._rank(name, copy)

    def drop(self, name: Name) -> None:
        """Forget a copy, if it is there."""
        copy = self._copies.pop(name, None)
        if copy is not None:
            self.bytes_used -= len(copy.contents)
            self._num_checkpoints -= name[0] == "checkpoint"

    def clear(self) -> None:
        """Forget all copies. What was learned stays."""
        self._copies.clear()
        self._heap.clear()
        self.bytes_used = self._num_checkpoints = 0

    def violations(self) -> list[str]:
        """What is wrong with its bookkeeping, for the audit."""
        wrong = []
        held = sum(len(copy.contents) for copy in self._copies.values())
        if held != self.bytes_used or held > self.num_bytes:
            wrong.append(f"host memory counts {self.bytes_used} bytes of {self.num_bytes} and holds {held}")
        if sum(kind == "checkpoint" for kind, _ in self._copies) != self._num_checkpoints:
            wrong.append(f"host memory counts {self._num_checkpoints} checkpoints, which is wrong")
        ranked = {name for rank, _, name in self._heap if name in self._copies and self._copies[name].rank == rank}
        if ranked != set(self._copies):
            wrong.append("a copy in host memory would never be dropped")
        return wrong

    def _make_free(self, num_bytes: int, rank: float) -> bool:
        """Drop copies of lower rank for `num_bytes`; none, if that does not suffice."""
        dropped: list[tuple[float, int, Name]] = []
        free = self.num_bytes - self.bytes_used
        while free < num_bytes:
            lowest = self._lowest()
            if lowest is None or lowest[0] >= rank:
                for entry in dropped:
                    heappush(self._heap, entry)
                if self._heap:  # what keeps others out must prove its worth: it ages with every refusal
                    self._age += max(0.0, self._heap[0][0] - self._age) / (len(self._copies) + 1)
                return False
            dropped.append(heappop(self._heap))
            free += len(self._copies[lowest[2]].contents)
        for lowest_rank, _, name in dropped:
            self._age = max(self._age, lowest_rank)
            self.drop(name)
        return True

    def _drop_lowest(self) -> bool:
        lowest = self._lowest()
        if lowest is not None:
            heappop(self._heap)
            self.drop(lowest[2])
        return lowest is not None

    def _lowest(self) -> tuple[float, int, Name] | None:
        """The first entry of the heap that is the rank of a copy."""
        while self._heap:
            rank, _, name = self._heap[0]
            copy = self._copies.get(name)
            if copy is not None and copy.rank == rank:
                return self._heap[0]
            heappop(self._heap)
        return None

    def _rank(self, name: Name, copy: Copy) -> None:
        """Rank a copy as if it came now."""
        rank = self._age + self._probability(copy.group) * copy.seconds / max(1, len(copy.contents))
        if rank != copy.rank:
            copy.rank = rank
            heappush(self._heap, (rank, next(self._order), name))
            if len(self._heap) > 4 * len(self._copies) + 64:
                self._heap = [(one.rank, next(self._order), key) for key, one in self._copies.items()]
                heapify(self._heap)

    def _probability(self, group: Hashable) -> float:
        stored, used = self._groups.get(group, (0.0, 0.0))
        return (used + 0.5) / (stored + 1.0)

    def _count(self, group: Hashable, stored: int, used: int) -> None:
        counts = self._groups.setdefault(group, [0.0, 0.0])
        counts[0] += stored
        counts[1] += used
        if counts[0] > HALVED_AFTER:
            counts[0] /= 2
            counts[1] /= 2
