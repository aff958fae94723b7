"""A picture of a cache at this moment, for `hybrid.observe`."""

from __future__ import annotations

from typing import Any

from hybrid.cache.stats import CacheStats
from hybrid.cache.tiers import Tiers
from hybrid.key import TOKEN_BYTES, common_prefix
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree

TOTALS = (
    "pages_total", "pages_cached", "pages_private", "pages_free",
    "states_total", "checkpoints", "states_private", "states_free",
    "evicted_pages", "evicted_checkpoints", "pins",
)  # fmt: skip
"""Fields of `CacheStats` that a picture shows."""

MAX_IDS = 24
"""Token ids of an edge that are kept."""

DEVICE = "device"
"""Name of the first tier."""


def take_snapshot(tree: Tree, stats: CacheStats, tiers: Tiers | None = None) -> dict[str, Any]:
    """Take the picture's data, in types of JSON. Nothing changes, recency included.

    Args:
        tiers: with copies of what was evicted; None: there are none.

    Returns:
        nodes: parents before their children: see `_view`.
        lives: the checkpoints that were evicted most recently, oldest first: `EvictedCheckpoint`.
        page_size: tokens per page.
        page_bytes, checkpoint_bytes: bytes of a page and of a checkpoint; 0 where the cache does not know them.
        now: number of requests so far.
        totals: pages and state slots by owner, by name.
        tiers: fastest first, the first is the device: the `name` of each, its pages, checkpoints and bytes, of the
            tree's nodes and of what has left the tree.
    """
    places: dict[int, int] = {}
    nodes: list[dict[str, Any]] = []
    for namespace, node in tree.nodes():
        places[id(node)] = len(nodes)
        holders = () if tiers is None else tiers.holders(tree.names.at(node, node.end))
        nodes.append(_view(tree, node, places.get(id(node.parent), -1), namespace, holders))
    page_bytes, checkpoint_bytes = stats.page_bytes, stats.checkpoint_bytes
    num_bytes = stats.pages_cached * page_bytes + stats.checkpoints * checkpoint_bytes
    copies = () if tiers is None else tiers.places
    return {
        "nodes": nodes,
        "lives": [life._asdict() for life in tree.recently_evicted],
        "page_size": tree.page_size,
        "page_bytes": page_bytes,
        "checkpoint_bytes": checkpoint_bytes,
        "now": tree.candidates.now,
        "totals": {name: getattr(stats, name) for name in TOTALS},
        "tiers": [
            _tier(DEVICE, stats.pages_cached, stats.checkpoints, num_bytes),
            *(_tier(tier.label, tier.num_pages, tier.num_checkpoints, tier.bytes_used) for tier in copies),
        ],
    }


def _tier(name: str, num_pages: int, num_checkpoints: int, num_bytes: int) -> dict[str, Any]:
    return {"name": name, "num_pages": num_pages, "num_checkpoints": num_checkpoints, "num_bytes": num_bytes}


def _ids(node: Node) -> list[int]:
    """List the first ids of an edge that differ from those of its siblings: they share less than a page."""
    assert node.parent is not None
    pages = node.parent.children  # by the first page of each edge
    first, last = min(pages), max(pages)  # what these two share all of them share
    shared = common_prefix(first, last, 0, 0, TOKEN_BYTES, len(first)) // TOKEN_BYTES if len(pages) > 1 else 0
    return memoryview(node.edge).cast("i")[shared : shared + MAX_IDS].tolist()


def _view(tree: Tree, node: Node, parent: int, namespace: str, holders: tuple[str, ...]) -> dict[str, Any]:
    """Describe a node.

    Args:
        parent: place of the parent among the nodes; -1 at the top of a namespace.
        holders: names of the tiers that have a copy of the checkpoint at its end.

    Returns:
        kind: why the checkpoint was put there; "pages" where there never was one.
        idle: requests since its last use.
        stored_at: number of requests that had come when the checkpoint was stored.
        value: rank that the eviction policy gives to the checkpoint: the lowest is evicted first. None without a
            checkpoint, or where the policy has no rank for it.
        tiers: names of the tiers that have the checkpoint.
        ids: token ids of the edge from where it differs from its siblings; from its beginning where it has none.
        text: theirs, where it is decoded.
        All others are those of `Node` and of its usage.
    """
    usage = node.usage
    return {
        "parent": parent,
        "namespace": namespace,
        "start": node.start,
        "end": node.end,
        "num_pages": node.num_pages,
        "has_checkpoint": node.slot is not None,
        "kind": usage.kind.value,
        "hits": usage.hits,
        "idle": tree.candidates.now - usage.used_at,
        "stored_at": usage.stored_at,
        "priority": usage.priority,
        "value": tree.candidates.value(node),
        "page_locks": node.page_locks,
        "state_locks": node.state_locks,
        "tiers": [*holders] if node.slot is None else [DEVICE, *holders],
        "ids": _ids(node),
        "text": "",
    }
