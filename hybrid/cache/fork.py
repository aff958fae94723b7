"""A second lease of the same tokens: the prompt of several answers is computed once, and its state is copied."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.cache.lease import Lease
from hybrid.memory.pool import EMPTY_STATE
from hybrid.units import ceil_div


def fork(cache: HybridCache, lease: Lease) -> Lease | None:
    """A lease with the same tokens up to the front of another one, which must have been advanced.

    Pages that the tree owns are shared. The other pages up to the front, and the front itself, are copied. None, and
    nothing changed, when there is no memory for that.
    """
    num_tokens, num_shared = lease.front_tokens, lease.num_shared
    num_private = ceil_div(num_tokens, cache.config.page_size) - num_shared
    if lease.front == EMPTY_STATE or lease.read_slot != lease.front or num_private < 0:
        return None
    allocated = cache.allocator.allocate_request(num_private)
    if allocated is None:
        return None
    front, pages = allocated
    copy = Lease(
        key=lease.key,
        num_known=lease.num_known,
        front=front,
        read_slot=front,
        front_tokens=num_tokens,
        num_hit_tokens=num_tokens,
        branching_len=None,
        explanation=lease.explanation,
        block_table=lease.block_table[:num_shared],
        num_shared=num_shared,
        page_lock=None,
        state_lock=None,
        priority=lease.priority,
        turn=lease.turn,
    )
    cache.leases.add(copy)
    cache.allocator.give_pages(copy, pages)
    try:
        if lease.page_lock is not None and lease.page_lock.node is not None:
            copy.page_lock = cache.tree.lock_pages(lease.page_lock.node, num_shared * cache.config.page_size)
            cache.allocator.share(copy)
        if cache.memory.mover is not None:
            own = lease.block_table[num_shared : num_shared + num_private]
            if own:
                cache.memory.mover.move_pages(dict(zip(own, pages, strict=True)))
            cache.memory.mover.move_states({lease.front: front})
    except BaseException:
        cache.close(copy)
        raise
    return copy
