"""How likely what leaves the device is to be wanted again, learned from what left it before: in this process, and in
those that used the same directory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from hybrid.tiers.process_lock import ProcessLock

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

    def left(self, group: str) -> None:
        """A checkpoint leaves the device."""
        self._count(group, 1, 0)

    def wanted(self, group: str) -> None:
        """A request would resume from one that has left."""
        self._count(group, 0, 1)

    def probability(self, group: str) -> float:
        """Of a checkpoint that leaves the device to be wanted again."""
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
        """What was counted since the last call."""
        with self._lock:
            news, self._news = self._news, {}
        return [(group, left, wanted) for group, (left, wanted) in news.items() if is_sound(group, left, wanted)]


def _add(counts: dict[str, tuple[float, float]], group: str, left: float, wanted: float) -> None:
    former = counts.get(group, (0.0, 0.0))
    counts[group] = halved(former[0] + left, former[1] + wanted)


def halved(left: float, wanted: float) -> tuple[float, float]:
    """Counts of a group, halved where there are many."""
    return (left / 2, wanted / 2) if max(left, wanted) > HALVED_AFTER else (left, wanted)


def is_sound(group: object, left: object, wanted: object) -> bool:
    """Whether counts are of the types and in the ranges of what is written."""
    return (
        isinstance(group, str)
        and GROUP.fullmatch(group) is not None
        and all(isinstance(count, float | int) and 0 <= count <= 2 * HALVED_AFTER for count in (left, wanted))
        and not any(math.isnan(count) for count in (left, wanted) if isinstance(count, float))
    )
