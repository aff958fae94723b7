"""Bugs of other caches for hybrid models, numbered as in test_scenarios.py: eviction and pressure."""

import pytest

from hybrid.key import Key
from support.caches import AuditedCache, RandomWorkload, audited_cache, key_of, release, serve, start


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=32, num_states=8)


def test_11_childless_tombstones_go_with_the_deepest_leaf_up_to_a_locked_one() -> None:
    """a o (locked)  ─  b o  ─  c o  ─  d *    The page of d takes those of c and b along."""
    cache = audited_cache(num_pages=8, num_states=4)
    for text in ("a", "ab", "abc", "abcd"):
        serve(cache, key_of(cache, text))
    cache.evict_checkpoints(3)
    lease = start(cache, key_of(cache, "ax"))
    assert lease.num_shared == 1
    cache.victims.clear()
    cache.evict_pages(1)
    assert [len(pages) for pages, _ in cache.victims] == [3]
    assert cache.tree.peek(key_of(cache, "abcd"), 8).num_page_tokens == 2
    cache.close(lease)
    cache.evict_pages(1)
    assert not cache.tree.knows("")


def test_13_a_cascade_may_take_the_node_that_would_have_been_next() -> None:
    """b o  ─  c o   and   x o,  z o    Used in the order b, c, x, z; b is no leaf, and goes with c."""
    cache = audited_cache(num_pages=8, num_states=4)
    for text in ("b", "bc", "x", "z"):
        serve(cache, key_of(cache, text))
    cache.evict_checkpoints(4)
    pages = {text: cache.tree.peek(key_of(cache, text), 4).deepest.pages[0] for text in ("b", "bc", "x")}
    cache.victims.clear()
    cache.evict_pages(3)
    assert cache.victims == [([pages["bc"], pages["b"], pages["x"]], [])]
    release(cache)


def test_14_an_allocation_evicts_no_more_than_it_needs_and_explicit_eviction_goes_on(cache: AuditedCache) -> None:
    for letter in "abcdefgh":
        serve(cache, key_of(cache, letter * 4))
    assert cache.stats().pages_free == 0
    lease = cache.open(key_of(cache, "x"), 1, 2)
    assert lease is not None
    stats = cache.stats()
    assert (stats.evicted_pages, stats.evicted_checkpoints) == (1, 1)  # for the front, and the tail of the same leaf
    assert cache.capture(lease, 2) is not None
    assert cache.stats().evicted_checkpoints == 2
    cache.evict_pages(10)
    assert cache.stats().evicted_pages == 11
    cache.clear()
    assert cache.stats().pages_cached == 0


def test_15_evicting_a_leaf_takes_its_checkpoint_and_evicting_all_checkpoints_leaves_the_pages(
    cache: AuditedCache,
) -> None:
    serve(cache, key_of(cache, "abcd"))
    serve(cache, key_of(cache, "xyz"))
    cache.evict_pages(4)
    assert (cache.stats().pages_cached, cache.stats().checkpoints) == (3, 1)
    cache.evict_checkpoints(99)
    assert cache.tree.peek(key_of(cache, "xyz"), 6)[:2] == (0, 6)
    assert (cache.stats().pages_cached, cache.stats().checkpoints) == (3, 0)


def test_16_a_hit_refreshes_only_the_checkpoint_it_used(cache: AuditedCache) -> None:
    """a *  ─  b *  ─  c *    A request for a b x uses b alone; so a goes first, then c, then b."""
    for text in ("a", "ab", "abc"):
        serve(cache, key_of(cache, text))  # each uses the one before: a, then b
    slots = {text: cache.tree.peek(key_of(cache, text), 9).checkpoint.slot for text in ("a", "ab", "abc")}
    cache.close(start(cache, key_of(cache, "abx")))
    cache.victims.clear()
    for _ in range(3):
        cache.evict_checkpoints(1)
    assert [slot for _, (slot,) in cache.victims] == [slots["a"], slots["abc"], slots["ab"]]


def test_16_a_partial_match_does_not_refresh_the_rest_of_the_edge(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    serve(cache, key_of(cache, "xyz"))
    cache.close(start(cache, key_of(cache, "abq")))
    cache.evict_pages(1)
    assert cache.tree.peek(key_of(cache, "abcd"), 8).num_page_tokens == 6


@pytest.mark.parametrize(("page_size", "chunk_size"), [(2, 8), (4, 8), (8, 8), (8, 2)])
def test_17_branching_len_comes_from_the_full_page_hit_across_tombstones(page_size: int, chunk_size: int) -> None:
    cache = audited_cache(num_pages=64, num_states=16, page_size=page_size, chunk_size=chunk_size)
    grid = cache.config.grid
    shared = [7] * (5 * grid + page_size)
    for length in (grid, 3 * grid, len(shared)):
        serve(cache, Key.of([*shared[:length], *[length] * grid]))
    cache.evict_checkpoints(99)
    lease = start(cache, Key.of([*shared, 1, 2, 3]))
    assert lease.branching_len == len(shared) // grid * grid
    assert lease.num_shared == len(shared) // page_size
    cache.capture(lease, lease.branching_len)
    cache.advance(lease, len(shared) + 3)
    cache.commit(lease, Key.of([*shared, 1, 2, 3]), len(shared))
    again = start(cache, Key.of([*shared, 4, 5]))
    assert (again.num_hit_tokens, again.branching_len) == (lease.branching_len, None)


def test_23_a_long_leaf_under_pressure_gives_up_its_tail() -> None:
    cache = audited_cache(num_pages=130, num_states=4, page_size=64, chunk_size=64)
    ids = list(range(8192))
    serve(cache, Key.of(ids))
    lease = cache.open(Key.of([1, 2, 3]), 2, 3 * 64)
    assert lease is not None
    assert cache.stats().evicted_pages == 1
    found = cache.tree.peek(Key.of(ids), 8192)
    assert (found.num_page_tokens, found.branching_len) == (8192 - 64, 8192 - 64)


@pytest.mark.parametrize("seed", range(6))
def test_24_random_requests_keep_the_books_and_every_content_right(seed: int) -> None:
    cache = audited_cache(num_pages=10 + seed, num_states=3 + seed % 5, page_size=2, chunk_size=2 << seed % 3)
    workload = RandomWorkload(cache, seed)
    workload.run(150)
    assert workload.num_finished > 0
    assert cache.stats().evicted_pages > 0
    release(cache)


def test_24_the_same_seed_evicts_the_same_victims_in_the_same_order() -> None:
    lives = []
    for _ in range(2):
        cache = audited_cache(num_pages=14, num_states=6, page_size=2, chunk_size=4)
        workload = RandomWorkload(cache, seed=3)
        workload.run(200)
        lives.append(cache.victims)
    assert lives[0] == lives[1]
    assert sum(len(pages) for pages, _ in lives[0]) > 20
