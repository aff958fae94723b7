"""What forward passes need of a lease, and what they change of it: its private pages and its two state slots."""

from __future__ import annotations

from hybrid.cache.allocator import Allocator
from hybrid.cache.lease import Lease
from hybrid.checks import count
from hybrid.errors import ArgumentError, OwnershipError
from hybrid.memory.pool import EMPTY_STATE
from hybrid.units import ceil_div


class Passes:
    """Prepares leases for passes, and follows what the passes did.

    The state after `Lease.front_tokens` tokens is in the front, and nothing but a pass writes it. What is called here
    changes no page and no state that the tree owns.

    Args:
        allocator: allocates pages and slots, and takes them back.
        page_size: tokens per page.
    """

    def __init__(self, allocator: Allocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """See `HybridCache.reserve`."""
        missing = ceil_div(count("reserve: num_tokens", num_tokens), self._page_size) - len(lease.block_table)
        if missing > 0:
            pages = self._allocator.allocate_pages(missing)
            if pages is None:
                return False
            self._allocator.give_pages(lease, pages)
        return True

    def trim(self, lease: Lease, num_pages: int) -> None:
        """See `HybridCache.trim`."""
        if len(lease.block_table) > max(count("trim: num_pages", num_pages), lease.num_shared):
            self._allocator.free_pages(lease.cut(num_pages))

    def take_back(self, lease: Lease) -> bool:
        """See `HybridCache.take_back`."""
        if lease.back is None:
            lease.back = self._allocator.allocate_state()
        return lease.back is not None

    def swap(self, lease: Lease) -> None:
        """See `HybridCache.swap`."""
        if lease.back is None:
            raise OwnershipError("swap: the lease has no back slot; call take_back before the pass")
        if lease.read_slot != lease.front:
            raise OwnershipError("swap: the first pass of a lease does not read its front, and must write the front")
        lease.front, lease.back, lease.back_tokens = lease.back, lease.front, lease.front_tokens

    def advance(self, lease: Lease, num_tokens: int) -> None:
        """See `HybridCache.advance`."""
        num_tokens, end = count("advance: num_tokens", num_tokens), len(lease.block_table) * self._page_size
        if not lease.front_tokens <= num_tokens <= end:
            raise ArgumentError(f"advance: to {num_tokens} tokens, from {lease.front_tokens} on, with pages for {end}")
        if lease.front == EMPTY_STATE:
            raise OwnershipError("advance: the front of the lease was donated")
        if lease.state_lock is not None:
            self._allocator.unlock(lease.state_lock)
            lease.state_lock = None
        lease.read_slot = lease.front
        lease.front_tokens = num_tokens

    def discard(self, lease: Lease) -> None:
        """See `HybridCache.discard`."""
        lease.is_void = True
        slots = [checkpoint.slot for checkpoint in lease.captured]
        lease.captured = []
        self._allocator.free_states(slots)
