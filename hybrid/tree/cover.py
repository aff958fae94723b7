"""How many pages a changing set of paths covers, without following all of them when asked."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.tree.node import Node

MAX_CHANGED = 4096
"""Nodes that may wait to be counted."""


class Cover:
    """The union of the paths from the roots to some nodes, counted in pages.

    `changed` only notes a node; `num_pages` brings the count up to date. A path is then followed only as far as no
    other one covers it, so that a path which came and went meanwhile costs nothing.

    Args:
        is_end: whether the path to a node is part of the union at present.
    """

    def __init__(self, is_end: Callable[[Node], bool]) -> None:
        self._is_end = is_end
        self._num_pages = 0
        self._changed: list[Node] = []
        self._ends: set[Node] = set()  # nodes whose paths are counted
        self._reasons: dict[Node, int] = {}  # why a node is counted: its path is, and each counted child

    def changed(self, node: Node) -> None:
        """What `is_end` says of a node may have changed."""
        self._changed.append(node)
        if len(self._changed) > MAX_CHANGED:
            self._settle()

    @property
    def num_pages(self) -> int:
        """Number of pages on the paths."""
        if self._changed:
            self._settle()
        return self._num_pages

    def _settle(self) -> None:
        while self._changed:
            node = self._changed.pop()
            if self._is_end(node):
                if node not in self._ends:
                    self._ends.add(node)
                    self._count(node)
            elif node in self._ends:
                self._ends.remove(node)
                self._uncount(node)

    def _count(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above.parent is not None:
            reasons = self._reasons.get(above, 0)
            self._reasons[above] = reasons + 1
            if reasons:
                return
            self._num_pages += above.num_pages
            above = above.parent

    def _uncount(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above.parent is not None:
            reasons = self._reasons.pop(above) - 1
            if reasons:
                self._reasons[above] = reasons
                return
            self._num_pages -= above.num_pages
            above = above.parent

    # What the forest does to nodes

    def extended(self, leaf: Node, num_pages: int) -> None:
        """The edge of a leaf has `num_pages` more pages."""
        if leaf in self._reasons:
            self._num_pages += num_pages

    def split(self, lower: Node, upper: Node) -> None:
        """The upper part of a node's edge has become a node of its own."""
        if lower in self._reasons:
            self._reasons[upper] = 1

    def leaving(self, node: Node) -> None:
        """A node whose path is not part of the union is about to be cut, removed or joined to its only child."""
        if node in self._ends:
            self._settle()
        self._reasons.pop(node, None)
