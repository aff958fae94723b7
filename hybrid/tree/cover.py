"""How many pages a changing set of paths covers, without following all of them when asked."""

from __future__ import annotations

from hybrid.tree.node import Node


class Cover:
    """The union of the paths from the roots to some nodes, its ends, counted in pages.

    `toggle` only notes a node; `num_pages` brings the count up to date. A path is then followed only as far as no
    other one covers it, and one that came and went meanwhile is not followed at all.
    """

    def __init__(self) -> None:
        self._num_pages = 0
        self._toggled: set[Node] = set()  # nodes that are ends and are not counted, or are counted and no ends
        self._counted: set[Node] = set()  # nodes that are counted as ends
        self._reasons: dict[Node, int] = {}  # why a node is counted: it is as an end, and each counted child

    def toggle(self, node: Node) -> None:
        """A node becomes an end, or is one no more."""
        if node in self._toggled:
            self._toggled.remove(node)
        else:
            self._toggled.add(node)

    @property
    def num_pages(self) -> int:
        """Number of pages on the paths."""
        while self._toggled:
            self._settle(self._toggled.pop())
        return self._num_pages

    def _settle(self, node: Node) -> None:
        if node in self._counted:
            self._counted.remove(node)
            self._uncount(node)
        else:
            self._counted.add(node)
            self._count(node)

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
        """A node that is not an end is about to be cut, removed or joined to its only child."""
        if node in self._toggled:
            self._toggled.remove(node)
            self._settle(node)
        self._reasons.pop(node, None)
