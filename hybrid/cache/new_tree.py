"""The tree of a cache."""

from __future__ import annotations

from hybrid.cache.config import CacheConfig
from hybrid.cache.tiers import Tiers
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policies import policy_of
from hybrid.tree.pools import Pools
from hybrid.tree.tree import Tree

GHOSTS_PER_PAGE, MIN_GHOSTS = 4, 1 << 17
"""The tree remembers this many evicted prefixes for each page of the memory, and at least this many: about 15 MB."""


def new_tree(memory: CacheMemory, config: CacheConfig, tiers: Tiers | None) -> Tree:
    """An empty tree for a memory.

    Args:
        tiers: see what it evicts, and what its policy values; None: there are none.
    """
    tree = Tree(
        config.page_size,
        config.grid,
        policy_of(config.eviction),
        memory.prices,
        max_ghosts=max(MIN_GHOSTS, GHOSTS_PER_PAGE * memory.pages.capacity),
        seed=config.seed,
        priority_cap=config.priority_cap,
        pools=Pools(leaving=tiers.departures if tiers is not None else None),
    )
    if tiers is not None:
        tiers.departures.follow(tree)
    return tree
