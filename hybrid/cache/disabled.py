"""The cache that is switched off."""

from __future__ import annotations

from pathlib import Path

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import cache_off
from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pin
from hybrid.errors import ArgumentError
from hybrid.key import Key
from hybrid.memory.copies import Contents
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.archive import Archive
from hybrid.tiers.fingerprint import Fingerprint
from hybrid.tiers.transfer import Transfer
from hybrid.tree.node import Checkpoint, Kind


class DisabledCache(HybridCache):
    """A cache that keeps nothing: every request computes its whole prompt. It manages memory all the same."""

    @property
    def enabled(self) -> bool:
        """Tell whether what requests computed is kept for others: never."""
        return False

    def begin(
        self, key: Key, limit: int, num_tokens: int, priority: int = 0, tenant: str | None = None
    ) -> Lease | None:
        """Open as in `HybridCache`; there is nothing to find."""
        lease = super().begin(key, limit, num_tokens, priority, tenant)
        if lease is not None:
            lease.explanation = cache_off(key)
        return lease

    def capture(self, lease: Lease, num_tokens: int, kind: Kind = Kind.PROMPT_END) -> Checkpoint | None:
        """Allocate nothing."""
        return None

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        """Allocate nothing."""
        return None

    def take_back(self, lease: Lease) -> bool:
        """Allocate nothing."""
        return False

    def commit(self, lease: Lease, key: Key, num_tokens: int) -> None:
        """Keep nothing."""

    def donate_states(self, lease: Lease, limit: int) -> None:
        """Keep nothing."""

    def load(
        self, source: str | Path | Contents | Archive, *, model: str | Fingerprint, vocab_size: int | None = None
    ) -> Transfer:
        """Raise ArgumentError: nothing can be loaded."""
        raise ArgumentError("load: this cache is disabled; use CacheConfig(enabled=True)")

    def keep_breakpoint(self, key: Key, num_tokens: int, ttl: float, tenant: str) -> bool:
        """Pin nothing."""
        return False

    def pin(self, key: Key, ttl: float = 0.0) -> Pin | None:
        """Pin nothing."""
        return None


def make_cache(memory: CacheMemory, config: CacheConfig, model: str | Fingerprint | None = None) -> HybridCache:
    """Make the cache that a configuration asks for: one that keeps prefixes, or one that is switched off.

    Args:
        model: see `HybridCache`.
    """
    return HybridCache(memory, config, model=model) if config.enabled else DisabledCache(memory, config)
