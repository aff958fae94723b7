"""How likely a checkpoint that leaves the device will be wanted again, learned from those that left before."""

from __future__ import annotations

from collections import deque

from hybrid.tiers.value import Reuse
from hybrid.tree.node import NodeUsage

MAX_HITS = 3
"""Checkpoints with more hits than this count as equal."""

MAX_WATCHED = 1 << 16
"""Checkpoints that left and are watched; beyond this many the one that left first is forgotten."""


class Chances:
    """Sees which checkpoints left the device, and which of them a request wanted afterwards, whether they were kept
    elsewhere or not. A group has the kind, whether anything continues from it, and the hits.

    Args:
        reuse: counts them by groups.
    """

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse
        self._watched: dict[int, tuple[NodeUsage, str]] = {}  # by the identity of the usage
        self._order: deque[int] = deque()

    @staticmethod
    def group(usage: NodeUsage, has_below: bool) -> str:
        """The group of a checkpoint, from which others continue or not."""
        spare = " spare" if usage.last_used == 0 else ""
        return f"{usage.kind.value} {'inner' if has_below else 'last'} {min(usage.hits, MAX_HITS)}{spare}"

    def left(self, usage: NodeUsage, group: str) -> None:
        """A checkpoint leaves the device."""
        self._reuse.left(group)
        if id(usage) not in self._watched:
            self._order.append(id(usage))
        self._watched[id(usage)] = usage, group
        while len(self._watched) > MAX_WATCHED:
            self._watched.pop(self._order.popleft(), None)

    def wanted(self, usage: NodeUsage) -> None:
        """A request would resume from a checkpoint that is not on the device."""
        watched = self._watched.pop(id(usage), None)
        if watched is not None:
            self._reuse.wanted(watched[1])
