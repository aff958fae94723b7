"""A radix tree of prefixes that are given as hashes.

Each hash is of all tokens up to there: two prefixes whose last hashes are equal are equal as a whole.
"""

from __future__ import annotations

from array import array
from typing import Generic, Self, TypeVar


class RadixNode:
    """An edge of the tree.

    Attributes:
        parent: the node above; None: this is the root, or it was removed.
        hashes: of its pages, in order.
        num_children: nodes below it.
    """

    __slots__ = ("hashes", "num_children", "parent")

    def __init__(self, parent: Self | None, hashes: array[int]) -> None:
        self.parent: Self | None = parent
        self.hashes: array[int] = hashes
        self.num_children: int = 0


N = TypeVar("N", bound=RadixNode)


class Radix(Generic[N]):
    """The nodes of a tree, by the hash of their first page.

    Args:
        root: a node without pages.
    """

    def __init__(self, root: N) -> None:
        self.root = root
        self._first: dict[int, N] = {}

    def __len__(self) -> int:
        return len(self._first)

    def next(self, hashes: array[int], start: int, end: int) -> tuple[N, int] | None:
        """The node that continues with a page of a prompt, and how many of its pages are those of the prompt, up to a
        page; None: there is none."""
        node = self._first.get(hashes[start]) if start < end else None
        if node is None:
            return None
        own = node.hashes
        high = min(len(own), end - start)
        if own[high - 1] == hashes[start + high - 1]:
            return node, high
        low = 1  # that many are the same, and fewer than `high`
        while high - low > 1:
            middle = (low + high) // 2
            if own[middle - 1] == hashes[start + middle - 1]:
                low = middle
            else:
                high = middle
        return node, low

    def add(self, leaf: N) -> None:
        """Enter a node below its parent."""
        self._first[leaf.hashes[0]] = leaf
        assert leaf.parent is not None
        leaf.parent.num_children += 1

    def cut(self, node: N, upper: N) -> None:
        """Put a new node, which has the first pages of another and its parent, between the two."""
        self._first[upper.hashes[0]] = upper
        upper.num_children = 1
        node.hashes, node.parent = node.hashes[len(upper.hashes) :], upper
        self._first[node.hashes[0]] = node

    def remove(self, leaf: N) -> N:
        """Take out a node that has none below it. Returns its parent."""
        del self._first[leaf.hashes[0]]
        above, leaf.parent = leaf.parent, None
        assert above is not None
        above.num_children -= 1
        return above
