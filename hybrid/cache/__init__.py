"""The prefix cache: a tree, its pools, the memory, and the leases of running requests."""

from hybrid.cache.cache import HybridCache

__all__ = ["HybridCache"]
