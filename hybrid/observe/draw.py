"""The tree, drawn in text."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.cache.cache import HybridCache
from hybrid.tree.node import Node
from hybrid.units import format_bytes

LEGEND = "● checkpoint   ○ tombstone (pages, no checkpoint)   ⚿ locked by so many requests (pages, state)"
SNIPPET = 30


def draw_tree(cache: HybridCache, decode: Callable[[list[int]], str]) -> str:
    """Every edge with its tokens and how they begin, what it owns, and who locks it.

    Args:
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

    def show(node: Node, indent: str, is_last: bool) -> None:
        start = node.end - len(node.pages) * page_size
        text = repr(decode(memoryview(node.edge).cast("i").tolist()[:SNIPPET]))[1 : SNIPPET + 1]
        owned = f"{len(node.pages)} pages"
        if stats.page_bytes:
            owned += f" {format_bytes(len(node.pages) * stats.page_bytes)}"
        if node.slot is not None:
            owned += " + state" + (f" {format_bytes(stats.checkpoint_bytes)}" if stats.checkpoint_bytes else "")
        mark = "●" if node.slot is not None else "○"
        locks = f"  ⚿ {node.page_locks},{node.state_locks}" if node.page_locks else ""
        branch = "└─" if is_last else "├─"
        lines.append(f"{indent}{branch}{mark} {start:>5}..{node.end:<5} {text:<{SNIPPET}}  {owned}{locks}")
        below = sorted(children.get(id(node), []), key=lambda child: -child.end)
        for at, child in enumerate(below):
            show(child, indent + ("   " if is_last else "│  "), at == len(below) - 1)

    for namespace, nodes in namespaces.items():
        lines.append(f"namespace {namespace!r}")
        for at, node in enumerate(nodes):
            show(node, "", at == len(nodes) - 1)
    if not namespaces:
        lines.append("(empty)")
    lines.append(
        f"pages: {stats.pages_cached} cached, {stats.pages_private} private, {stats.pages_free} free; "
        f"states: {stats.checkpoints} checkpoints, {stats.states_private} private, {stats.states_free} free"
    )
    return "\n".join(lines)
