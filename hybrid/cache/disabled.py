"""The cache that is switched off."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.cache.explain import Explanation, cache_off
from hybrid.cache.lease import Lease, Pin
from hybrid.key import Key
from hybrid.tree.node import Checkpoint, Kind, Match


class PassThroughCache(HybridCache):
    """A cache that keeps nothing: every request computes its whole prompt. Memory is managed all the same."""

    keeps = False

    def capture(self, lease: Lease, num_tokens: int, kind: Kind = Kind.PROMPT_END) -> Checkpoint | None:
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
