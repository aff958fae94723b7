"""The structure of the tree: nodes by namespace, and how they are made, cut, joined and removed.

Every method either completes or, when memory runs out in the middle, changes nothing that can be seen. The counts of
pages, checkpoints, slots, of what counts for each tenant, and of what locks protect are kept up to date here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

from hybrid.key import TOKEN_BYTES, common_prefix
from hybrid.tree.node import Kind, Node, NodeUsage, Root, Run, Tenant, end_of
from hybrid.tree.values import PageValues, SlotValue, page_ids

FEW = 4
"""Nodes of a run that are followed one by one."""

MAX_CHANGED = 4096
"""Nodes that may wait to be counted."""


class Forest:
    """The nodes of all namespaces, with their counts.

    Args:
        page_size: tokens per page.
        name_step: tokens between two positions at which prefixes have names.
        page_values: makes a container of values of pages.

    Attributes:
        roots: the root of each namespace that holds something.
        page_bytes: bytes of the token ids of a page.
        num_pages, num_checkpoints: what the nodes own.
        counters: unions of paths that follow the changes of nodes.
    """

    def __init__(self, page_size: int, name_step: int, page_values: Callable[..., PageValues] = page_ids) -> None:
        self.page_size: int = page_size
        self._name_step = name_step
        self._collect = page_values
        self.page_bytes: int = page_size * TOKEN_BYTES
        self.num_pages: int = 0
        self.num_checkpoints: int = 0
        self.roots: dict[str, Root] = {}
        self.counters: list[LockedPathCounter] = []

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Iterate over every node except the roots, parents first, with its namespace."""
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
        leaf.owner.num_pages += len(pages)
        for counter in self.counters:
            if leaf in counter.reasons:
                counter.extended(len(pages))

    def add_leaf(self, parent: Node, ids: bytes, pages: PageValues, usage: NodeUsage, owner: Tenant) -> Node:
        """Add a child to `parent`, which owns `pages`: the next of the parent's run, or the first of a run."""
        run, start = parent.run, parent.end
        end = start + len(ids) // TOKEN_BYTES
        if parent.children or parent.parent is None:
            run = Run(start, self.page_size, self._name_step, ids, self._collect(pages))
            leaf = Node(parent, run, start, end, usage, owner)
        else:
            leaf = Node(parent, run, start, end, usage, owner)
            run.append(ids, pages)
        run.nodes.append(leaf)
        parent.children[ids[: self.page_bytes]] = leaf
        num_pages = len(pages)
        self.num_pages += num_pages
        owner.num_pages += num_pages
        return leaf

    # Cutting and joining edges

    def split(self, lower: Node, num_tokens: int) -> Node:
        """Cut an edge at a position. Returns the upper part, a tombstone; checkpoint, children and locks stay with the
        lower part."""
        parent, run = lower.parent, lower.run
        assert parent is not None and lower.start < num_tokens < lower.end
        upper = Node(parent, run, lower.start, num_tokens, pages_usage(lower.usage), lower.owner)
        first = self._page_at(run, lower.start)
        upper.children[self._page_at(run, num_tokens)] = lower
        run.nodes.insert(run.index(lower), upper)
        # Nothing can fail from here on.
        parent.children[first] = upper
        lower.parent, lower.start = upper, num_tokens
        for counter in self.counters:
            if lower in counter.reasons:
                counter.split(upper)
        return upper

    def join(self, upper: Node) -> bool:
        """Join a node to its only child, if nothing needs the cut between them: no checkpoint, present or lost, no
        branch, no lock. From outside the two are one node, which was the child. Returns whether they were joined."""
        parent = upper.parent
        if (
            parent is None
            or upper.slot is not None
            or len(upper.children) != 1
            or upper.page_locks
            or upper.lost_checkpoint
        ):
            return False
        (lower,) = upper.children.values()
        if lower.run is not upper.run:
            upper.run.take_over(lower.run)
        run, first = upper.run, self._page_at(upper.run, upper.start)
        for counter in self.counters:
            if upper in counter.reasons:
                counter.leaving(upper)
        if upper.owner is not lower.owner:
            upper.owner.num_pages -= upper.num_pages
            lower.owner.num_pages += upper.num_pages
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
        for counter in self.counters:
            if leaf in counter.reasons:
                counter.leaving(leaf)
        leaf.run.cut(num_pages, into)
        # Nothing can fail from here on.
        leaf.usage = usage
        leaf.lost_checkpoint = False  # its position is cut off too
        leaf.end -= num_pages * self.page_size
        self.num_pages -= num_pages
        leaf.owner.num_pages -= num_pages

    def remove(self, leaf: Node, into: PageValues) -> Node:
        """Remove a leaf, and append its pages to `into`. Returns its former parent; a root without children is removed
        from `roots`."""
        parent, run, start = leaf.parent, leaf.run, leaf.start
        assert parent is not None and not leaf.children and not leaf.page_locks
        for counter in self.counters:
            if leaf in counter.reasons:
                counter.leaving(leaf)
        first, num_pages = self._page_at(run, start), (leaf.end - start) // self.page_size
        run.cut(num_pages, into)
        # Nothing can fail from here on.
        del parent.children[first]
        run.nodes.pop()
        self.num_pages -= num_pages
        leaf.owner.num_pages -= num_pages
        leaf.parent = None
        if parent.parent is None and not parent.children:
            assert isinstance(parent, Root)
            del self.roots[parent.namespace]
        return parent

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
        node.owner.num_checkpoints += 1

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
        node.owner.num_checkpoints -= 1

    def count_for(self, node: Node, tenant: Tenant) -> None:
        """Count a node for another tenant from now on."""
        has_checkpoint, num_pages = node.slot is not None, node.num_pages
        node.owner.num_pages -= num_pages
        node.owner.num_checkpoints -= has_checkpoint
        node.owner = tenant
        tenant.num_pages += num_pages
        tenant.num_checkpoints += has_checkpoint

    def _page_at(self, run: Run, num_tokens: int) -> bytes:
        first = (num_tokens - run.start) * TOKEN_BYTES
        return bytes(run.ids[first : first + self.page_bytes])


def pages_usage(usage: NodeUsage) -> NodeUsage:
    """Make the usage of a part of a node that has no checkpoint of its own."""
    return NodeUsage(usage.created, usage.last_used, 0, Kind.PAGES, usage.used_at)


def descend(ids: bytes, node: Node, end: int, page_bytes: int) -> tuple[Node, int]:
    """Follow a key from the end of a node on its path, as far as the tree has its pages.

    Most runs are on the path as a whole, and are compared in one step. Where one is not, the key most often leaves it
    at the end of a node, because others have left it there.

    Args:
        ids: bytes of the key's token ids.
        end: byte of the key at which to stop.
        page_bytes: bytes of the ids of a page.

    Returns:
        The node of the last page, and the byte of the key after it, which may be inside the node's edge.
    """
    offset = node.end * TOKEN_BYTES
    while offset < end:
        child = node.children.get(ids[offset : offset + page_bytes])
        if child is None:
            break
        run = child.run
        nodes, run_ids = run.nodes, run.ids
        stop = offset + len(run_ids)
        if stop <= end and child is nodes[0] and ids.startswith(run_ids, offset):
            node, offset = nodes[-1], stop
            continue
        start, stop = (child.start - run.start) * TOKEN_BYTES, child.end * TOKEN_BYTES
        is_new = start > 0 or child is not nodes[-1]  # the edge is not the run that was just compared
        if is_new and stop <= end and ids.startswith(run_ids[start : start + stop - offset], offset):
            node, offset = child, stop
            if child is not nodes[-1] and len(nodes) > FEW:
                node = _deepest(ids, child, end)
                offset = node.end * TOKEN_BYTES
            continue
        return child, offset + common_prefix(ids, run_ids, offset, start, page_bytes, min(end, stop) - offset)
    return node, offset


def _deepest(ids: bytes, node: Node, end: int) -> Node:
    """Find the deepest node of a run up to which a key follows it, from a node of the run that is on the key's path."""
    run, offset = node.run, node.end * TOKEN_BYTES
    nodes, shift = run.nodes, run.start * TOKEN_BYTES
    low = run.index(node) + 1
    high = bisect_right(nodes, end // TOKEN_BYTES, low, key=end_of)
    while low < high:
        middle = (low + high) // 2
        stop = nodes[middle].end * TOKEN_BYTES
        if ids.startswith(run.ids[offset - shift : stop - shift], offset):
            node, offset, low = nodes[middle], stop, middle + 1
        else:
            high = middle
    return node


class LockedPathCounter:
    """The union of the paths from the roots to some nodes, its ends, counted in pages.

    A node that becomes an end, or is one no more, is only noted; `num_pages` brings the count up to date. A path is
    then followed only as far as no other one covers it, and one that came and went meanwhile is not followed at all.

    Args:
        is_end: whether a node is an end at present.

    Attributes:
        changed: nodes that have become ends, or are ends no more, and wait to be counted. The one that adds them calls
            `recount` before they are many more than `MAX_CHANGED`.
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
        self.recount()
        return self._num_pages

    def recount(self) -> None:
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

    def check(self, nodes: Iterable[Node]) -> bool:
        """Return whether the counts are those of these nodes, all that there are: for `Tree.check`."""
        self.recount()
        other = LockedPathCounter(self._is_end)
        other.changed.update(node for node in nodes if self._is_end(node))
        other.recount()
        counted = {node for node in self._counted if node.parent is not None}  # no page is on the path to a root
        return (counted, self.reasons, self._num_pages) == (other._counted, other.reasons, other._num_pages)

    # What the forest does to nodes

    def extended(self, num_pages: int) -> None:
        """Record that the edge of a leaf that is in `reasons` has `num_pages` more pages."""
        self._num_pages += num_pages

    def split(self, upper: Node) -> None:
        """Record that the upper part of the edge of a node that is in `reasons` has become a node of its own."""
        self.reasons[upper] = 1

    def leaving(self, node: Node) -> None:
        """Record that a node in `reasons` that is no end is about to be cut, removed or joined to its only child."""
        if node in self._counted:
            self._counted.remove(node)
            self._uncount(node)
        self.reasons.pop(node, None)
