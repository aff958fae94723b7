"""How many pages a changing set of paths covers, without following all of them when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hybrid.tree.node import Node

MAX_CHANGED = 4096
"""Nodes that may wait to be counted."""


class Cover:
    """The union of the paths from the roots to some nodes, its ends, counted in pages.

    A node that becomes an end, or is one no more, is only noted; `num_pages` brings the count up to date. A path is
    then followed only as far as no other one covers it, and one that came and went meanwhile is not followed at all.

    Args:
        is_end: whether a node is an end at present.

    Attributes:
        changed: nodes that have become ends, or are ends no more, and wait to be counted. The one that adds them calls
            `settle` before they are many more than `MAX_CHANGED`.
        reasons: of each node whose pages are counted, why: it is counted as an end, and each child that is counted.
    """

    def __init__(self, is_end: Callable[[Node], bool]) -> None:
        self.changed: set[Node] = set()
        self.reasons: dict[Node, int] = {}
        self._is_end = is_end
        self._num_pages = 0
        self._counted: set[Node] = set()  # nodes that are counted as ends

    @property
    def num_pages(self) -> int:
        """Number of pages on the paths."""
        self.settle()
        return self._num_pages

    def settle(self) -> None:
        """Bring the count up to date."""
        while self.changed:
            node = self.changed.pop()
            if self._is_end(node):
                if node not in self._counted:
                    self._counted.add(node)
                    self._count(node)
            elif node in self._counted:
                self._counted.remove(node)
                self._uncount(node)

    def _count(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above.parent is not None:
            reasons = self.reasons.get(above, 0)
            self.reasons[above] = reasons + 1
            if reasons:
                return
            self._num_pages += above.num_pages
            above = above.parent

    def _uncount(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above.parent is not None:
            reasons = self.reasons.pop(above) - 1
            if reasons:
                self.reasons[above] = reasons
                return
            self._num_pages -= above.num_pages
            above = above.parent

    def is_right(self, nodes: Iterable[Node]) -> bool:
        """Whether the counts are those of these nodes, all that there are: for the audit."""
        self.settle()
        other = Cover(self._is_end)
        other.changed.update(node for node in nodes if self._is_end(node))
        other.settle()
        counted = {node for node in self._counted if node.parent is not None}  # no page is on the path to a root
        return (counted, self.reasons, self._num_pages) == (other._counted, other.reasons, other._num_pages)

    # What the forest does to nodes

    def extended(self, num_pages: int) -> None:
        """The edge of a leaf that is in `reasons` has `num_pages` more pages."""
        self._num_pages += num_pages

    def split(self, upper: Node) -> None:
        """The upper part of the edge of a node that is in `reasons` has become a node of its own."""
        self.reasons[upper] = 1

    def leaving(self, node: Node) -> None:
        """A node that is in `reasons` and no end is about to be cut, removed or joined to its only child."""
        if node in self._counted:
            self._counted.remove(node)
            self._uncount(node)
        self.reasons.pop(node, None)
