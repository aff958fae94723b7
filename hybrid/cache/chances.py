"""How likely a checkpoint that leaves the device will be wanted again, learned from those that left before."""

from __future__ import annotations

from collections import deque

from hybrid.tree.node import NodeUsage

MAX_HITS = 3
"""Checkpoints with more hits than this count as equal."""

HALVED_AFTER = 4096
"""The counts of a group are halved when it has this many: what was learned long ago counts less."""

MAX_WATCHED = 1 << 16
"""Checkpoints that left and are watched; beyond this many the one that left first is forgotten."""


class Chances:
    """Counts how many checkpoints of each group left the device, and how many of them a request wanted afterwards,
    whether they were kept elsewhere or not. A group has the kind, whether anything continues from it, and the hits."""

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = {}  # left, wanted
        self._watched: dict[int, tuple[NodeUsage, str]] = {}  # by the identity of the usage
        self._order: deque[int] = deque()

    @staticmethod
    def group(usage: NodeUsage, has_below: bool) -> str:
        """The group of a checkpoint, from which others continue or not."""
        spare = " spare" if usage.last_used == 0 else ""
        return f"{usage.kind.value} {'inner' if has_below else 'last'} {min(usage.hits, MAX_HITS)}{spare}"

    def left(self, usage: NodeUsage, group: str) -> None:
        """A checkpoint leaves the device."""
        counts = self._counts.setdefault(group, [0.0, 0.0])
        counts[0] += 1
        if counts[0] > HALVED_AFTER:
            counts[:] = [count / 2 for count in counts]
        if id(usage) not in self._watched:
            self._order.append(id(usage))
        self._watched[id(usage)] = usage, group
        while len(self._watched) > MAX_WATCHED:
            self._watched.pop(self._order.popleft(), None)

    def wanted(self, usage: NodeUsage) -> None:
        """A request would resume from a checkpoint that is not on the device."""
        watched = self._watched.pop(id(usage), None)
        if watched is not None:
            self._counts[watched[1]][1] += 1

    def probability(self, group: str) -> float:
        """Of a checkpoint that leaves the device to be wanted again."""
        left, wanted = self._counts.get(group, (0.0, 0.0))
        return (wanted + 0.5) / (left + 1.0)
