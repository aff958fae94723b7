"""The statistics of a cache at this moment."""

from __future__ import annotations

from dataclasses import replace

from hybrid.cache.allocator import Allocator
from hybrid.cache.pins import Pins
from hybrid.cache.restores import Restores
from hybrid.cache.stats import CacheStats
from hybrid.cache.tiers import Tiers
from hybrid.memory.memory import CacheMemory
from hybrid.tree.tree import Tree


def current(
    stats: CacheStats,
    tree: Tree,
    memory: CacheMemory,
    allocator: Allocator,
    pins: Pins,
    tiers: Tiers | None,
    restores: Restores | None,
) -> CacheStats:
    """What a cache did and holds. May be called from any thread.

    Args:
        stats: what it counts itself.
    """
    now = replace(stats)
    now.evicted_pages += allocator.evicted_pages
    now.evicted_checkpoints += allocator.evicted_checkpoints
    now.moved_pages += allocator.num_moved
    now.pages_total, now.pages_free = memory.pages.capacity, memory.pages.num_free
    now.states_total, now.states_free = memory.checkpoints.capacity, memory.checkpoints.num_free
    now.pages_cached, now.checkpoints = tree.num_pages, tree.num_checkpoints
    now.pages_private, now.states_private = allocator.num_private()
    if tiers is not None:
        tiers.count(now)
    if restores is not None:
        restores.count(now)
    now.pins, now.policy_failure = len(pins), tree.policy_failure
    return now
