"""The value of a copy: when one is made, and which is dropped first. One rule for all tiers.

The eviction policy of the device decides what leaves it, and in which order. A tier copies a checkpoint that is likely
to save as much time as copying it takes, and drops the copy of the lowest rank (`EvictionOrder`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from hybrid.lazy_heap import LazyHeap
from hybrid.tiers.cost import Cost, MeasuredTime
from hybrid.tiers.tier import Note
from hybrid.tiers.worker import ProcessLock

WORTHLESS = -math.inf
"""The value of what is not worth keeping."""

# How likely hits are

HALVED_AFTER = 4096
"""The counts of a group are halved when it has this many: what was learned long ago counts less."""

MAX_GROUPS = 256
"""Groups of which a directory keeps something: there are fewer."""

GROUP = re.compile(r"[a-z_]{1,20} (inner|last) [0-9]( spare)?")
"""Names of groups: words of this package, nothing of a prompt."""

Counts = tuple[str, float, float]
"""A group, how many of its checkpoints left the device, and how many of them were wanted again."""


class Reuse:
    """Counts, by groups of checkpoints, how many left the device and how many of them a request wanted afterwards. May
    be used by several threads."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._has_learned = False
        self._counts: dict[str, tuple[float, float]] = {}
        self._news: dict[str, tuple[float, float]] = {}  # since `take_news`

    def count_evicted(self, group: str) -> None:
        """Count a checkpoint that leaves the device."""
        self._count(group, 1, 0)

    def count_requested(self, group: str) -> None:
        """Count a request that would resume from one that has left."""
        self._count(group, 0, 1)

    def probability(self, group: str) -> float:
        """The probability that a checkpoint that leaves the device is wanted again."""
        left, wanted = self._counts.get(group, (0.0, 0.0))
        return min(1.0, (wanted + 0.5) / (left + 1.0))

    def _count(self, group: str, left: float, wanted: float) -> None:
        with self._lock:
            for counts in (self._counts, self._news):
                _add(counts, group, left, wanted)

    def learn(self, counts: Iterable[Counts]) -> None:
        """Add what other processes have learned. What cannot be right is left out. Another call does nothing."""
        with self._lock:
            if self._has_learned:
                return
            self._has_learned = True
            for group, left, wanted in counts:
                if is_sound(group, left, wanted):
                    _add(self._counts, group, left, wanted)

    def take_news(self) -> list[Counts]:
        """Return what was counted since the last call."""
        with self._lock:
            news, self._news = self._news, {}
        return [(group, left, wanted) for group, (left, wanted) in news.items() if is_sound(group, left, wanted)]


def _add(counts: dict[str, tuple[float, float]], group: str, left: float, wanted: float) -> None:
    former = counts.get(group, (0.0, 0.0))
    counts[group] = halved(former[0] + left, former[1] + wanted)


def halved(left: float, wanted: float) -> tuple[float, float]:
    """Halve the counts of a group where there are many."""
    return (left / 2, wanted / 2) if max(left, wanted) > HALVED_AFTER else (left, wanted)


def is_sound(group: object, left: object, wanted: object) -> bool:
    """Tell whether counts are of the types and in the ranges of what is written."""
    return (
        isinstance(group, str)
        and GROUP.fullmatch(group) is not None
        and all(isinstance(count, float | int) and 0 <= count <= 2 * HALVED_AFTER for count in (left, wanted))
        and not any(math.isnan(count) for count in (left, wanted) if isinstance(count, float))
    )


# The rule


class Savings:
    """The rule by which copies are made and kept: what a hit on a checkpoint is likely to save.

    A hit saves the time to compute the tokens of the pages that only the checkpoint needs, since no other checkpoint is
    at one of them (at least, what it saved when it left the device), less that of restoring it. It is as likely as hits
    on checkpoints like it were.

    Args:
        compute: seconds per token that is computed.
        reuse: how likely hits were.
        page_bytes, checkpoint_bytes: of a page and of a checkpoint.
        page_size: tokens per page.

    Attributes:
        compute, reuse: as given.
    """

    def __init__(
        self, compute: MeasuredTime, reuse: Reuse, page_bytes: int, checkpoint_bytes: int, page_size: int
    ) -> None:
        self.compute: MeasuredTime = compute
        self.reuse: Reuse = reuse
        self._page_bytes = page_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._page_size = page_size

    def gain(self, num_tokens: int, seconds: float, *costs: Cost) -> float:
        """Seconds that restoring saves over computing. Where it saves none, costs that were measured fade: later they
        are measured again.

        Args:
            seconds: that restoring takes.
            costs: by which that was found.
        """
        gain = num_tokens * self.compute.value - seconds
        if gain <= 0:
            for cost in costs:
                cost.fade()
        return gain

    def is_worth_copying(self, note: Note, cost: Cost, is_certain: bool) -> bool:
        """Tell whether a checkpoint that leaves the device is likely to save as much time as copying it and its pages
        takes, which is taken to be that of restoring them.

        Args:
            cost: of a restore.
            is_certain: it is copied whatever is likely, if a restore would save time.
        """
        saved = self.gain(note.num_tokens, cost.seconds(self._checkpoint_bytes), cost)
        if saved <= 0:
            return False
        copying = cost.seconds(self._checkpoint_bytes + note.num_tokens // self._page_size * self._page_bytes)
        return is_certain or saved * self.reuse.probability(note.group) > copying

    def value(self, note: Note, cost: Cost, num_alone: int) -> float:
        """The value of a copy when it comes or is used: what `EvictionOrder` ranks by.

        The chance of a hit, times the hits that there were, times the fourth root of the seconds that a hit saves per
        byte: by seconds per byte themselves the longest prefixes would push out all others (docs/tiers.md).

        Args:
            cost: of a restore.
            num_alone: pages that only this checkpoint needs.
        """
        num_bytes = self._checkpoint_bytes + num_alone * self._page_bytes
        saved = max(note.num_tokens, num_alone * self._page_size) * self.compute.value - cost.seconds(num_bytes)
        hits = note.usage.hits if note.usage is not None else 0
        return self.reuse.probability(note.group) * (1 + hits) * (saved / num_bytes) ** 0.25 if saved > 0 else WORTHLESS


KeyT = TypeVar("KeyT", bound=Hashable)


class EvictionOrder(Generic[KeyT]):
    """The order in which a tier drops its entries: GreedyDual.

    The rank of an entry is its value, counted from the rank of what was dropped last. So of two that are worth the same
    the one that was used longer ago is dropped first, and what is worth more stays longer without being used.
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._ranks: LazyHeap[KeyT] = LazyHeap()

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._ranks)

    def rank(self, value: float) -> float:
        """The rank of an entry of this value that is used now."""
        return self._floor + value

    def use(self, key: KeyT, value: float) -> None:
        """Give an entry the rank of one that is used now, also one that comes."""
        self._ranks.put(key, self.rank(value))

    def lowest(self) -> tuple[float, KeyT] | None:
        """The rank and the key of what is dropped first; None if there is nothing."""
        return self._ranks.first

    def discard(self, key: KeyT) -> None:
        """Forget an entry, if it is there."""
        if key in self._ranks:
            self._ranks.remove(key)

    def drop(self, key: KeyT) -> None:
        """Forget an entry that goes because of its rank: from now on ranks are counted from it."""
        self._floor = max(self._floor, self._ranks.remove(key))

    def clear(self) -> None:
        """Forget all entries."""
        self._ranks = LazyHeap()


class PageRefCounts:
    """The pages that the checkpoints of a tier need, by the names of the prefixes that they end.

    Each is counted for the page after it, and for a checkpoint at its end, so that a checkpoint is counted in a time
    that depends on the pages that nothing needed before, not on the length of its prefix."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._above: dict[bytes, bytes | None] = {}
        self._checkpoints: set[bytes] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def has_checkpoint(self, name: bytes) -> bool:
        """Tell whether there is a checkpoint at the end of a page."""
        return name in self._checkpoints

    def add(self, path: Iterable[bytes]) -> list[bytes]:
        """Count the pages of a checkpoint, if it is not there.

        Args:
            path: their names, the last first. Read as far as it is not known.

        Returns:
            Those that nothing needed before, in this order.
        """
        names = iter(path)
        name = next(names, None)
        if name is None or name in self._checkpoints:
            return []
        self._checkpoints.add(name)
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] > 1:
            return []
        self._above[name] = None
        return [name, *self._join(name, names, False)]

    def extend(self, name: bytes, path: Iterable[bytes]) -> list[bytes]:
        """Count the pages before one that is needed, if they were not known until now.

        Args:
            path: their names, the last first.

        Returns:
            See `add`.
        """
        return self._join(name, iter(path), True) if name in self._counts and self._above[name] is None else []

    def _join(self, page: bytes, path: Iterator[bytes], is_counted: bool) -> list[bytes]:
        """Count the pages before one. `is_counted`: it was needed before, and others may lead to it."""
        below, added = page, dict.fromkeys((page,))
        for name in path:
            is_known = name in self._counts
            if name in added or (is_known and is_counted and page in self.upward(name)):
                break  # the path of a damaged manifest leads back to itself
            self._above[below] = name
            self._counts[name] = self._counts.get(name, 0) + 1
            if is_known:
                break
            self._above[name] = None
            added[name] = None
            below = name
        return [*added][1:]

    def remove(self, name: bytes) -> list[tuple[bytes, bytes | None]]:
        """Forget a checkpoint. Returns the names of the pages that nothing needs any more, each with that of the page
        before it, the last first."""
        self._checkpoints.remove(name)
        gone: list[tuple[bytes, bytes | None]] = []
        page: bytes | None = name
        while page is not None:
            self._counts[page] -= 1
            if self._counts[page]:
                break
            del self._counts[page]
            above = self._above.pop(page)
            gone.append((page, above))
            page = above
        return gone

    def upward(self, name: bytes | None) -> Iterator[bytes]:
        """The names of a page that is needed and of those before it, as far as they are known."""
        while name is not None:
            yield name
            name = self._above[name]

    def checkpoints(self, name: bytes) -> list[bytes]:
        """The checkpoints that need a page. Looks at all."""
        return [one for one in self._checkpoints if name in self.upward(one)]

    def clear(self) -> None:
        """Forget all."""
        self._counts.clear()
        self._above.clear()
        self._checkpoints.clear()

    def violations(self, checkpoints: Iterable[bytes]) -> list[str]:
        """Return what is wrong with it, for the audit.

        Args:
            checkpoints: those that there are.
        """
        expected: dict[bytes, int] = dict.fromkeys(self._checkpoints, 1)
        for above in self._above.values():
            if above is not None:
                expected[above] = expected.get(above, 0) + 1
        wrong = []
        if expected != self._counts or self._above.keys() != self._counts.keys():
            wrong.append("pages are counted for others than those that need them")
        if self._checkpoints != set(checkpoints):
            wrong.append("the checkpoints are not those whose pages are needed")
        return wrong
