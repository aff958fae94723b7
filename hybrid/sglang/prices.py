"""What a page and a state take of the memory of SGLang's pools."""

from __future__ import annotations

from typing import Any

from hybrid.units import Prices


def prices_of(params: Any) -> Prices:
    """Bytes of a page and of a state.

    Args:
        params: SGLang's `CacheInitParams`, with its pools.
    """
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    kv_bytes = pool.get_kv_size_bytes()
    total = sum(kv_bytes) if isinstance(kv_bytes, tuple) else kv_bytes
    states = params.req_to_token_pool.mamba_pool
    page = max(1, int(total) * params.page_size // max(1, pool.size))
    state = max(1, int(states.get_kv_size_bytes()) // max(1, states.size))
    return Prices(page, state)
