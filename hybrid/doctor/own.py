"""Our cache without contents: its own bookkeeping serves the requests of traffic."""

from __future__ import annotations

import numpy as np

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.doctor.engine import MISS, Hit
from hybrid.doctor.request import UNIT, LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Kind
from hybrid.tree.policy import Policy
from hybrid.units import ceil_div

PAGE = 64
"""Tokens of a page."""


class OwnCache:
    """Our cache, for one request at a time.

    A page's hashes stand for its tokens: a page is as many ids of 32 bits as it has hashes, so that all positions are
    those of tokens divided by `UNIT`.

    Args:
        sizes: of the model.
        memory: bytes of pages and states, or what is endless.
        eviction: the policy, as in `CacheConfig`.

    Raises:
        MemoryBudgetError: the memory does not hold a page and the states of one request.
    """

    def __init__(self, sizes: Sizes, memory: Memory, *, eviction: str | Policy = "lhd") -> None:
        page = PAGE // UNIT
        config = CacheConfig(page_size=page, chunk_size=page, eviction=eviction)
        if isinstance(memory, Endless):
            num_pages = 2 * memory.num_tokens // PAGE + 1024  # more than half is free: states are put everywhere
            indices = CacheMemory.of_indices(num_pages, num_pages)
        else:
            indices = CacheMemory.of_bytes(memory, PAGE * sizes.token_bytes, sizes.state_bytes or 64)
        self._cache = HybridCache(indices, config)

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        ids = np.frombuffer(request.hashes, np.uint64).astype(np.uint32)  # the lower half of each
        key = Key(ids.tobytes(), request.namespace)
        hit, pages = serve(self._cache, key, ceil_div(request.num_prompt, UNIT), request.num_tokens // UNIT)
        return Hit(hit * UNIT, pages * UNIT)


def serve(cache: HybridCache, key: Key, num_input: int, num_whole: int | None = None) -> tuple[int, int]:
    """Serve one request from its prompt to its last token, as the engine does.

    Args:
        key: of its prompt and its answer.
        num_input: tokens of the prompt.
        num_whole: tokens of the key that are whole; None: all.

    Returns:
        Its usable hit and its page hit, 0 when it could not have its memory.
    """
    grid, names, length = cache.config.grid, cache.config.placement, len(key)
    lease = cache.open(key, num_input - 1, num_input)
    if lease is None:
        return MISS
    hit, pages = lease.num_hit_tokens, lease.explanation.page_hit
    wanted = placement.of_prompt(
        names, num_input, grid, branching_len=lease.branching_len, shared=(), declared=(), is_replay=False
    )
    for position, kind in wanted.items():
        if position > hit:
            cache.capture(lease, position, kind)
    if "geometric" in names:
        for position in placement.spare(hit, num_input, grid, cache.memory.free_state_share):
            if position not in wanted and cache.capture_spare(lease, position) is None:
                break
    cache.advance(lease, num_input)
    cache.commit(lease, key, num_input // grid * grid)
    if cache.reserve(lease, length):
        whole = (length if num_whole is None else num_whole) // grid * grid
        if "turn_end" in names and whole > num_input:
            cache.capture(lease, whole, Kind.TURN_END)
        cache.advance(lease, length)
        cache.commit(lease, key, whole)
        if "turn_end" in names:
            cache.end_turn(lease, length)
    cache.close(lease)
    return hit, pages
