"""The cache that is switched off."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import Explanation, cache_off
from hybrid.cache.lease import Lease, Pin
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint, Match


class DisabledCache(HybridCache):
    """A cache that keeps nothing: every request computes its whole prompt. Memory is managed all the same."""

    keeps = False

    def capture(self, lease: Lease, num_tokens: int, kind: str = "") -> Checkpoint | None:
        return None

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        return None

    def take_back(self, lease: Lease) -> bool:
        return False

    def commit(self, lease: Lease, key: Key, num_tokens: int) -> None:
        return None

    def donate_states(self, lease: Lease, limit: int) -> None:
        return None

    def pin(self, key: Key, ttl: float = 0.0) -> Pin | None:
        return None

    def _explain(self, key: Key, limit: int, found: Match) -> Explanation:
        return cache_off(key)


def make_cache(memory: CacheMemory, config: CacheConfig) -> HybridCache:
    """The cache that a configuration asks for: one that keeps prefixes, or one that is switched off."""
    return HybridCache(memory, config) if config.enabled else DisabledCache(memory, config)
