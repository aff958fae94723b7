"""The structure of the tree: nodes by namespace, and how they are made, cut and removed.

Every method either completes or, when memory runs out in the middle, changes nothing that can be seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from hybrid.key import TOKEN_BYTES
from hybrid.tree.node import Kind, Node, NodeUsage, Root


class Forest:
    """The nodes of all namespaces, with their counts.

    Args:
        page_size: tokens per page.

    Attributes:
        roots: the root of each namespace that holds something.
        page_bytes: bytes of the token ids of a page.
        num_pages, num_checkpoints: what the nodes own.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes: int = page_size * TOKEN_BYTES
        self.num_pages: int = 0
        self.num_checkpoints: int = 0
        self.roots: dict[str, Root] = {}

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Every node except the roots, parents first, with its namespace."""
        for namespace, root in self.roots.items():
            stack = list(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(reversed(node.children.values()))

    def add_leaf(self, parent: Node, edge: bytes, pages: Sequence[int], usage: NodeUsage) -> Node:
        """A new child of `parent`, which owns `pages`."""
        leaf = Node(parent, edge, array("i", pages), parent.end + len(edge) // TOKEN_BYTES, usage)
        parent.children[edge[: self.page_bytes]] = parent.newest = leaf
        self.num_pages += len(leaf.pages)
        return leaf

    def split(self, lower: Node, length: int) -> Node:
        """Cut an edge after `length` bytes. Returns the upper half, a tombstone; checkpoint, children and locks stay
        with the lower half."""
        upper_parent, num_pages = lower.parent, length // self.page_bytes
        assert upper_parent is not None and 0 < length < len(lower.edge)
        usage = pages_usage(lower.usage)
        end = lower.end - (len(lower.edge) - length) // TOKEN_BYTES
        upper = Node(upper_parent, lower.edge[:length], lower.pages[:num_pages], end, usage)
        edge, pages = lower.edge[length:], lower.pages[num_pages:]
        upper.children[edge[: self.page_bytes]] = upper.newest = lower
        # Nothing can fail from here on.
        upper_parent.children[upper.edge[: self.page_bytes]] = upper
        if upper_parent.newest is lower:
            upper_parent.newest = upper
        lower.parent, lower.edge, lower.pages = upper, edge, pages
        return upper

    def cut(self, leaf: Node, num_pages: int) -> array[int]:
        """Take the last `num_pages` pages, which are not all, from a leaf without a checkpoint."""
        keep = len(leaf.pages) - num_pages
        usage = pages_usage(leaf.usage)
        edge, pages, cut = leaf.edge[: keep * self.page_bytes], leaf.pages[:keep], leaf.pages[keep:]
        # Nothing can fail from here on.
        leaf.usage, leaf.edge, leaf.pages = usage, edge, pages
        leaf.lost_checkpoint = False  # its position is cut off too
        leaf.chain = None
        leaf.end -= num_pages * self.page_size
        self.num_pages -= num_pages
        return cut

    def remove(self, leaf: Node) -> Node:
        """Remove a leaf. Returns its former parent; a root without children is removed from `roots`."""
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.page_locks
        self.num_pages -= len(leaf.pages)
        del parent.children[leaf.edge[: self.page_bytes]]
        if parent.newest is leaf:
            parent.newest = next(reversed(parent.children.values()), None)
        leaf.parent, leaf.former_parent = None, parent
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.namespace]
        return parent

    def put_checkpoint(self, node: Node, slot: int) -> None:
        """Make a node the owner of a checkpoint."""
        node.slot = slot
        node.lost_checkpoint = False
        self.num_checkpoints += 1

    def drop_checkpoint(self, node: Node) -> None:
        """Take the checkpoint from a node. A spare one that no request has used is not remembered as lost."""
        node.slot = None
        node.lost_checkpoint = node.usage.last_used > 0
        self.num_checkpoints -= 1


def pages_usage(usage: NodeUsage) -> NodeUsage:
    """The usage of a part of a node that has no checkpoint of its own."""
    return NodeUsage(usage.created, usage.last_used, 0, Kind.PAGES, usage.used_at)
