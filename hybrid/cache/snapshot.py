"""A picture of a cache at this moment, for `hybrid.observe`."""

from __future__ import annotations

from hybrid.cache.stats import CacheStats
from hybrid.cache.tiers import Tiers
from hybrid.key import TOKEN_BYTES, common_prefix
from hybrid.observe.snapshot import MAX_IDS, Life, NodeView, Snapshot, TierView
from hybrid.tiers.tier import Tier
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree

TOTALS = (
    "pages_total", "pages_cached", "pages_private", "pages_free",
    "states_total", "checkpoints", "states_private", "states_free",
    "evicted_pages", "evicted_checkpoints", "pins",
)  # fmt: skip
"""Fields of `CacheStats` that a picture shows."""

DEVICE = "device"
"""Name of the first tier."""


def take_snapshot(tree: Tree, stats: CacheStats, tiers: Tiers | None = None) -> Snapshot:
    """Take the picture's data. Nothing changes, recency included.

    Args:
        tiers: with copies of what was evicted; None: there are none.
    """
    places: dict[int, int] = {}
    nodes: list[NodeView] = []
    for namespace, node in tree.nodes():
        parent = node.parent
        assert parent is not None
        places[id(node)] = len(nodes)
        holders = () if tiers is None else tiers.holders(tree.names.at(node, node.end))
        nodes.append(_view(tree, node, places.get(id(parent), -1), namespace, holders))
    page_bytes, checkpoint_bytes = stats.page_bytes, stats.checkpoint_bytes
    num_bytes = stats.pages_cached * page_bytes + stats.checkpoints * checkpoint_bytes
    device = TierView(DEVICE, stats.pages_cached, stats.checkpoints, num_bytes)
    return Snapshot(
        nodes=tuple(nodes),
        lives=tuple(Life(*life) for life in tree.recently_evicted),
        page_size=tree.page_size,
        page_bytes=page_bytes,
        checkpoint_bytes=checkpoint_bytes,
        now=tree.candidates.now,
        totals={name: getattr(stats, name) for name in TOTALS},
        tiers=(device, *(() if tiers is None else map(_tier, tiers.places))),
    )


def _tier(tier: Tier) -> TierView:
    return TierView(tier.label, tier.num_pages, tier.num_checkpoints, tier.bytes_used)


def _ids(node: Node) -> tuple[int, ...]:
    """List the first ids of an edge that differ from those of its siblings: they share less than a page."""
    assert node.parent is not None
    pages = node.parent.children  # by the first page of each edge
    first, last = min(pages), max(pages)  # what these two share all of them share
    shared = common_prefix(first, last, 0, 0, TOKEN_BYTES, len(first)) // TOKEN_BYTES if len(pages) > 1 else 0
    return tuple(memoryview(node.edge).cast("i")[shared : shared + MAX_IDS].tolist())


def _view(tree: Tree, node: Node, parent: int, namespace: str, holders: tuple[str, ...]) -> NodeView:
    usage = node.usage
    return NodeView(
        parent=parent,
        namespace=namespace,
        start=node.start,
        end=node.end,
        num_pages=node.num_pages,
        has_checkpoint=node.slot is not None,
        kind=usage.kind.value,
        hits=usage.hits,
        idle=tree.candidates.now - usage.used_at,
        stored_at=usage.stored_at,
        priority=usage.priority,
        value=tree.candidates.value(node),
        page_locks=node.page_locks,
        state_locks=node.state_locks,
        tiers=holders if node.slot is None else (DEVICE, *holders),
        ids=_ids(node),
    )
