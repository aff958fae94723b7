"""The prefix tree as text."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.cache.cache import HybridCache
from hybrid.cache.stats import CacheStats
from hybrid.tree.node import Node
from hybrid.units import format_bytes

LEGEND = "● checkpoint   ○ tombstone (pages, no checkpoint)   ⚿ number of locks (pages, state)"
SNIPPET = 30
"""Characters of a node's text that are shown."""


def draw_tree(cache: HybridCache, decode: Callable[[list[int]], str]) -> str:
    """Draw every node: its range of tokens, how its text begins, what it owns, and its locks.

    Args:
        cache: it is only read.
        decode: turns token ids into text.
    """
    stats, page_size = cache.stats(), cache.config.page_size
    children: dict[int, list[Node]] = {}
    namespaces: dict[str, list[Node]] = {}
    for namespace, node in cache.tree.nodes():
        parent = node.parent
        assert parent is not None
        if parent.parent is None:
            namespaces.setdefault(namespace, []).append(node)
        else:
            children.setdefault(id(parent), []).append(node)
    lines = []
    for namespace, nodes in namespaces.items():
        lines.append(f"namespace {namespace!r}")
        pending = [(node, "", node is nodes[-1]) for node in reversed(nodes)]
        while pending:
            node, indent, is_last = pending.pop()
            lines.append(f"{indent}{'└─' if is_last else '├─'}{_describe(node, page_size, stats, decode)}")
            below = sorted(children.get(id(node), []), key=lambda child: child.end)
            indent += "   " if is_last else "│  "
            pending += [(child, indent, child is below[0]) for child in below]
    if not namespaces:
        lines.append("(empty)")
    lines.append(
        f"pages: {stats.pages_cached} cached, {stats.pages_private} private, {stats.pages_free} free; "
        f"states: {stats.checkpoints} checkpoints, {stats.states_private} private, {stats.states_free} free"
    )
    return "\n".join(lines)


def _describe(node: Node, page_size: int, stats: CacheStats, decode: Callable[[list[int]], str]) -> str:
    start = node.start
    text = repr(decode(memoryview(node.edge).cast("i").tolist()[:SNIPPET]))[1 : SNIPPET + 1]
    owned = f"{node.num_pages} pages"
    if stats.page_bytes:
        owned += f" {format_bytes(node.num_pages * stats.page_bytes)}"
    if node.slot is not None:
        owned += " + state" + (f" {format_bytes(stats.checkpoint_bytes)}" if stats.checkpoint_bytes else "")
    mark = "●" if node.slot is not None else "○"
    locks = f"  ⚿ {node.page_locks},{node.state_locks}" if node.page_locks else ""
    return f"{mark} {start:>5}..{node.end:<5} {text:<{SNIPPET}}  {owned}{locks}"
