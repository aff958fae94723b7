"""The structure of the tree: nodes by namespace, and how they are made, cut, joined and removed.

Every method either completes or, when memory runs out in the middle, changes nothing that can be seen. The counts of
pages, checkpoints, slots and of what locks protect are kept up to date here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from hybrid.key import TOKEN_BYTES
from hybrid.tree.cover import Cover
from hybrid.tree.node import Kind, Node, NodeUsage, Root, Run, end_of
from hybrid.tree.pools import INTEGERS, PageValues, Pools, SlotValue


class Forest:
    """The nodes of all namespaces, with their counts.

    Args:
        page_size: tokens per page.
        grid: tokens between two positions at which prefixes are hashed.
        pools: what pages and checkpoints are.

    Attributes:
        roots: the root of each namespace that holds something.
        page_bytes: bytes of the token ids of a page.
        num_pages, num_checkpoints: what the nodes own.
        covers: unions of paths that follow the changes of nodes.
    """

    def __init__(self, page_size: int, grid: int, pools: Pools = INTEGERS) -> None:
        self.page_size: int = page_size
        self._grid = grid
        self._collect: Callable[[PageValues], PageValues] = pools.collect
        self._keeps_cuts = pools.whole_edges
        self.page_bytes: int = page_size * TOKEN_BYTES
        self.num_pages: int = 0
        self.num_checkpoints: int = 0
        self.roots: dict[str, Root] = {}
        self.covers: list[Cover] = []

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Every node except the roots, parents first, with its namespace."""
        for namespace, root in self.roots.items():
            stack = list(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(reversed(node.children.values()))

    # Growing

    def extend(self, leaf: Node, ids: bytes, pages: PageValues, usage: NodeUsage) -> None:
        """Make the edge of a leaf without a checkpoint longer."""
        leaf.run.append(ids, pages)
        # Nothing can fail from here on.
        leaf.end += len(ids) // TOKEN_BYTES
        leaf.usage = usage
        self.num_pages += len(pages)
        for cover in self.covers:
            if leaf in cover.reasons:
                cover.extended(len(pages))

    def add_leaf(self, parent: Node, ids: bytes, pages: PageValues, usage: NodeUsage) -> Node:
        """A new child of `parent`, which owns `pages`: the next of the parent's run, or the first of a run."""
        run, start = parent.run, parent.end
        end = start + len(ids) // TOKEN_BYTES
        if parent.children or parent.parent is None:
            run = Run(start, self.page_size, ids, self._collect(pages))
            leaf = Node(parent, run, start, end, usage)
        else:
            leaf = Node(parent, run, start, end, usage)
            run.append(ids, pages)
        run.nodes.append(leaf)
        parent.children[ids[: self.page_bytes]] = leaf
        self.num_pages += len(pages)
        return leaf

    # Cutting and joining edges

    def split(self, lower: Node, num_tokens: int) -> Node:
        """Cut an edge at a position. Returns the upper part, a tombstone; checkpoint, children and locks stay with the
        lower part."""
        parent, run = lower.parent, lower.run
        assert parent is not None and lower.start < num_tokens < lower.end
        upper = Node(parent, run, lower.start, num_tokens, pages_usage(lower.usage))
        first = self._page_at(run, lower.start)
        upper.children[self._page_at(run, num_tokens)] = lower
        run.nodes.insert(run.index(lower), upper)
        # Nothing can fail from here on.
        parent.children[first] = upper
        lower.parent, lower.start = upper, num_tokens
        for cover in self.covers:
            if lower in cover.reasons:
                cover.split(upper)
        return upper

    def join(self, upper: Node) -> bool:
        """Join a node to its only child, if nothing needs the cut between them: no checkpoint, present or lost, no
        branch, no lock. From outside the two are one node, which was the child. Returns whether they were joined."""
        parent = upper.parent
        if (
            parent is None
            or self._keeps_cuts
            or upper.slot is not None
            or len(upper.children) != 1
            or upper.page_locks
            or upper.lost_checkpoint
        ):
            return False
        (lower,) = upper.children.values()
        if lower.run is not upper.run:
            upper.run.take_over(lower.run, self._grid)
        run, first = upper.run, self._page_at(upper.run, upper.start)
        for cover in self.covers:
            if upper in cover.reasons:
                cover.leaving(upper)
        del run.nodes[run.index(upper)]
        lower.start, lower.parent = upper.start, parent
        parent.children[first] = lower
        upper.parent = None
        upper.children = {}
        return True

    # Evicting

    def cut(self, leaf: Node, num_pages: int, into: PageValues) -> None:
        """Take the last `num_pages` pages, which are not all, from a leaf without a checkpoint, and append them to
        `into`."""
        usage = leaf.usage if leaf.usage.kind is Kind.PAGES else pages_usage(leaf.usage)
        for cover in self.covers:
            if leaf in cover.reasons:
                cover.leaving(leaf)
        leaf.run.cut(num_pages, into)
        # Nothing can fail from here on.
        leaf.usage = usage
        leaf.lost_checkpoint = False  # its position is cut off too
        leaf.end -= num_pages * self.page_size
        self.num_pages -= num_pages
        if leaf.run.digests:
            self._forget_digests(leaf.run, leaf.end)

    def remove(self, leaf: Node, into: PageValues) -> Node:
        """Remove a leaf, and append its pages to `into`. Returns its former parent; a root without children is removed
        from `roots`."""
        parent, run, start = leaf.parent, leaf.run, leaf.start
        assert parent is not None and not leaf.children and not leaf.page_locks
        for cover in self.covers:
            if leaf in cover.reasons:
                cover.leaving(leaf)
        first, num_pages = self._page_at(run, start), (leaf.end - start) // self.page_size
        run.cut(num_pages, into)
        # Nothing can fail from here on.
        del parent.children[first]
        run.nodes.pop()
        if run.digests:
            self._forget_digests(run, start)
        self.num_pages -= num_pages
        leaf.parent = None
        if parent.parent is None and not parent.children:
            assert isinstance(parent, Root)
            del self.roots[parent.namespace]
        return parent

    def _forget_digests(self, run: Run, num_tokens: int) -> None:
        del run.digests[num_tokens // self._grid - run.start // self._grid :]

    # Checkpoints

    def put_checkpoint(self, node: Node, slot: SlotValue) -> None:
        """Make a node the owner of a checkpoint."""
        stored = node.run.stored
        if not stored or stored[-1].end < node.end:
            stored.append(node)
        else:
            insort(stored, node, key=end_of)
        node.slot = slot
        node.lost_checkpoint = False
        self.num_checkpoints += 1

    def drop_checkpoint(self, node: Node) -> None:
        """Take the checkpoint from a node. A spare one that no request has used is not remembered as lost."""
        assert node.slot is not None
        stored = node.run.stored
        if stored[-1] is node:
            stored.pop()
        else:
            del stored[bisect_left(stored, node.end, key=end_of)]
        node.slot = None
        node.lost_checkpoint = node.usage.last_used > 0
        self.num_checkpoints -= 1

    def _page_at(self, run: Run, num_tokens: int) -> bytes:
        first = (num_tokens - run.start) * TOKEN_BYTES
        return bytes(run.ids[first : first + self.page_bytes])


def pages_usage(usage: NodeUsage) -> NodeUsage:
    """The usage of a part of a node that has no checkpoint of its own."""
    return NodeUsage(usage.created, usage.last_used, 0, Kind.PAGES, usage.used_at, pages_used=usage.pages_used)
