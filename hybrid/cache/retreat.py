"""Taking back the advance of a lease whose pass turned out to write nothing for it."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.cache.lease import Lease
from hybrid.errors import ArgumentError


def retreat(cache: HybridCache, lease: Lease, num_tokens: int, swapped: bool) -> None:
    """A lease is as it was before its last `swap` and `advance`: the front holds the state after `num_tokens` tokens.

    Args:
        num_tokens: where the front was, which the pass read.
        swapped: front and back changed places for the pass. The back counts as empty now.

    Raises:
        ArgumentError: the front is not beyond `num_tokens`, or is not the lease's own.
        OwnershipError: the lease was closed.
    """
    cache.reserve(lease, 0)  # refuses a lease that was closed
    if num_tokens >= lease.front_tokens or lease.read_slot != lease.front:
        raise ArgumentError(f"retreat: to {num_tokens} tokens, from {lease.front_tokens}; to before its last pass only")
    if swapped:
        cache.swap(lease)
        lease.back_tokens = 0
    lease.read_slot, lease.front_tokens = lease.front, num_tokens
