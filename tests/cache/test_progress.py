"""Every request makes progress: what fits into an empty cache fits into a full one in which nothing else runs."""

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from support.caches import AuditedCache, audited_cache, key_of, release, serve, start
from support.elastic import ONE, THREE, TWO, elastic, held

MIB = 2**20
PAGE = 16


def pair(num_tokens: int, num_shared: int) -> tuple[Key, Key]:
    """Two prompts that begin with the same pages."""
    shared = range(num_shared * PAGE)
    return tuple(  # type: ignore[return-value]
        Key.of([*shared, *range(first, first + num_tokens - len(shared))]) for first in (10_000, 50_000)
    )


@pytest.mark.parametrize("num_shared", [1, 4])
@pytest.mark.parametrize("memory", [4, 6, 8])
@pytest.mark.parametrize("sizes", [(16_384, 133_120), (16_384, 12_288), (2_048, 26_624)])
def test_a_second_prompt_that_shares_a_little_with_a_large_one_is_started(
    sizes: tuple[int, int], memory: int, num_shared: int
) -> None:
    """Only the pages that are shared are locked: the rest of the first prompt can be evicted."""
    cache = HybridCache(CacheMemory.of_bytes(memory * MIB, *sizes), CacheConfig(page_size=PAGE, chunk_size=PAGE))
    keys = pair(int(0.8 * cache.largest_request) * PAGE, num_shared)
    for key in (*keys, *keys):
        lease = cache.open(key, len(key) - 1, len(key))
        assert lease is not None
        cache.capture(lease, len(key) - PAGE)
        cache.advance(lease, len(key))
        cache.commit(lease, key, len(key))
        cache.close(lease)
        cache.audit()


@pytest.mark.parametrize("sizes", [ONE, TWO, THREE])
def test_the_largest_request_is_started_whatever_the_cache_holds(sizes: tuple[int, int]) -> None:
    """Prompts that share from nothing to all but the last page with what is there."""
    cache = elastic(12, sizes)
    length = cache.largest_request
    for num_shared in range(length):
        serve(cache, key_of(cache, "x" * length))
        lease = start(cache, key_of(cache, "x" * num_shared + "y" * (length - num_shared)))
        assert len(lease.block_table) == length
        cache.close(lease)
    release(cache)


def test_a_match_inside_an_edge_leaves_the_rest_of_it_to_be_evicted() -> None:
    """abcdef *    abxy comes:    ab o      locked
    cdef *   may be evicted
    """
    cache = audited_cache(num_pages=16, num_states=8)
    serve(cache, key_of(cache, "abcdef"))
    lease = start(cache, key_of(cache, "abxy"))
    assert (lease.num_shared, cache.tree.locks.num_pages) == (2, 2)
    cache.clear()
    assert cache.stats().pages_cached == 2
    cache.close(lease)
    release(cache)


# All or nothing


def full_of_states() -> AuditedCache:
    """Four pieces: the empty state, and two prefixes of a page and a checkpoint."""
    cache = elastic(6, ONE)
    for letter in "abc":
        serve(cache, key_of(cache, letter))
    return cache


@pytest.mark.parametrize("num_pages", range(10, 20))
def test_an_open_that_cannot_have_its_pages_evicts_nothing_for_its_state(num_pages: int) -> None:
    cache = full_of_states()
    other = start(cache, key_of(cache, "xyz"))
    before = held(cache)
    lease = cache.open(key_of(cache, "v" * num_pages), 2 * num_pages - 1, 2 * num_pages)
    assert lease is None
    assert held(cache) == before
    cache.close(other)
    release(cache)


def test_an_open_whose_own_hit_is_in_the_way_evicts_nothing() -> None:
    """Three state slots: the checkpoint it reads, and two of other requests, so that no front is left."""
    cache = audited_cache(num_pages=16, num_states=3)
    serve(cache, key_of(cache, "ab"))
    others = [start(cache, key_of(cache, letter)) for letter in "xy"]
    serve_before = held(cache)
    assert cache.open(key_of(cache, "abc"), 5, 6) is None
    assert held(cache) == serve_before
    for other in others:
        cache.close(other)
    release(cache)


def test_an_open_without_a_state_evicts_no_pages() -> None:
    cache = audited_cache(num_pages=6, num_states=2)
    serve(cache, key_of(cache, "abcd"))
    others = [start(cache, key_of(cache, "x")), start(cache, key_of(cache, "y"))]
    before = held(cache)
    assert cache.open(key_of(cache, "v" * 3), 5, 6) is None
    assert held(cache) == before
    for other in others:
        cache.close(other)
    release(cache)
