"""Following a key down the tree: how far the tree has its pages."""

from __future__ import annotations

from bisect import bisect_right

from hybrid.key import TOKEN_BYTES, common_prefix
from hybrid.tree.node import Node, end_of

FEW = 4
"""Nodes of a run that are followed one by one."""


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
    """The deepest node of a run up to which a key follows it, from a node of the run that is on the key's path."""
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
