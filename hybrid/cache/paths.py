"""Pages of a lease in which several continuations of its tokens are computed, of which one is kept."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.cache.lease import Lease
from hybrid.errors import ArgumentError


def extend(cache: HybridCache, lease: Lease, num_pages: int) -> bool:
    """Make sure that a lease has `num_pages` pages, from memory that is free: nothing is evicted. False, and nothing
    changed, when there is too little.

    Raises:
        OwnershipError: the lease was closed.
    """
    cache.reserve(lease, 0)  # refuses a lease that was closed
    missing = num_pages - len(lease.block_table)
    if missing > 0:
        pages = cache.memory.pages.allocate(missing)
        if pages is None:
            return False
        cache.allocator.give_pages(lease, pages)
    return True


def exchange(cache: HybridCache, lease: Lease, first: int, second: int) -> None:
    """Two private pages of a lease change places in its block table.

    Raises:
        ArgumentError: one of them is not private, or there is none.
        OwnershipError: the lease was closed.
    """
    cache.reserve(lease, 0)  # refuses a lease that was closed
    if not lease.num_shared <= min(first, second) <= max(first, second) < len(lease.block_table):
        raise ArgumentError(
            f"exchange: places {first} and {second} of {len(lease.block_table)} pages, of which the first "
            f"{lease.num_shared} are shared"
        )
    cache.allocator.exchange_pages(lease, first, second)
