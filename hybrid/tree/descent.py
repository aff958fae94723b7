"""Following a key down the tree: how far the tree has its pages."""

from __future__ import annotations

from bisect import bisect_right

from hybrid.key import TOKEN_BYTES, common_prefix
from hybrid.tree.node import Node, end_of


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
        stop = offset + len(run.ids)
        if stop <= end and child.start == run.start and ids.startswith(run.ids, offset):
            node, offset = run.nodes[-1], stop
            continue
        deepest = _whole_nodes(ids, child, end)
        if deepest is None:
            start = (child.start - run.start) * TOKEN_BYTES
            length = min(end, child.end * TOKEN_BYTES) - offset
            return child, offset + common_prefix(ids, run.ids, offset, start, page_bytes, length)
        node, offset = deepest, deepest.end * TOKEN_BYTES
    return node, offset


def _whole_nodes(ids: bytes, first: Node, end: int) -> Node | None:
    """The deepest node of a run whose edge, and those of the nodes before it from `first` on, are on the key's path.
    None: not even that of `first` is."""
    run, found = first.run, None
    nodes, shift = run.nodes, run.start * TOKEN_BYTES
    low = run.index(first)
    high = bisect_right(nodes, end // TOKEN_BYTES, low, key=end_of)
    offset, middle = first.start * TOKEN_BYTES, low  # most often it is the first node, or none
    while low < high:
        stop = nodes[middle].end * TOKEN_BYTES
        if ids.startswith(run.ids[offset - shift : stop - shift], offset):
            found, offset, low = nodes[middle], stop, middle + 1
        else:
            high = middle
        middle = (low + high) // 2
    return found
