"""Pages of a lease in which several continuations are computed: they come from free memory, and change places."""

import pytest

from hybrid.errors import ArgumentError, OwnershipError
from support.caches import AuditedCache, audited_cache, key_of, serve, start


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=6, num_states=8)


def num_free(cache: AuditedCache) -> int:
    return cache.memory.pages.num_free


def test_a_lease_gets_the_pages_that_it_lacks(cache: AuditedCache) -> None:
    lease = start(cache, key_of(cache, "ab"))
    own = list(lease.block_table)
    for num_pages, expected in ((3, 3), (2, 3), (0, 3), (6, 6)):
        assert cache.reserve_from_free(lease, num_pages)
        assert (len(lease.block_table), num_free(cache)) == (expected, 6 - expected)
        cache.audit()
    assert list(lease.block_table[:2]) == own
    assert sorted(lease.block_table) == sorted(set(lease.block_table))


def test_where_memory_is_not_free_nothing_changes_and_nothing_is_evicted(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "xyz"))  # the tree keeps three pages
    lease = start(cache, key_of(cache, "ab"))
    assert not cache.reserve_from_free(lease, 4)
    assert (len(lease.block_table), num_free(cache), cache.tree.num_pages) == (2, 1, 3)
    assert cache.reserve_from_free(lease, 3)
    assert (num_free(cache), cache.tree.num_pages) == (0, 3)
    cache.audit()


def test_a_lease_without_pages_is_asked_for_none(cache: AuditedCache) -> None:
    lease = cache.open(key_of(cache, "ab"), 3, 0)
    assert lease is not None
    assert cache.reserve_from_free(lease, 0)
    with pytest.raises(ArgumentError, match="places 0 and 0 of 0 pages"):
        cache.swap_pages(lease, 0, 0)
    assert (len(lease.block_table), num_free(cache)) == (0, 6)


def test_private_pages_change_places(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    lease = start(cache, key_of(cache, "abcde"))
    assert lease.num_shared == 2
    shared, (c, d, e) = list(lease.block_table[:2]), lease.block_table[2:]
    cache.swap_pages(lease, 2, 4)
    assert list(lease.block_table) == [*shared, e, d, c]
    cache.swap_pages(lease, 3, 2)
    assert list(lease.block_table) == [*shared, d, e, c]
    cache.swap_pages(lease, 4, 4)
    assert list(lease.block_table) == [*shared, d, e, c]
    cache.audit()


@pytest.mark.parametrize("places", [(1, 3), (3, 1), (0, 0), (2, 5), (5, 2), (-1, 3)])
def test_shared_pages_and_places_that_are_not_there_are_refused(cache: AuditedCache, places: tuple[int, int]) -> None:
    serve(cache, key_of(cache, "ab"))
    lease = start(cache, key_of(cache, "abcde"))
    before = list(lease.block_table)
    with pytest.raises(ArgumentError, match=f"places {places[0]} and {places[1]} of 5 pages, of which the first 2"):
        cache.swap_pages(lease, *places)
    assert list(lease.block_table) == before


def test_a_closed_lease_gets_nothing(cache: AuditedCache) -> None:
    lease = start(cache, key_of(cache, "ab"))
    cache.close(lease)
    with pytest.raises(OwnershipError):
        cache.reserve_from_free(lease, 3)
    with pytest.raises(OwnershipError):
        cache.swap_pages(lease, 0, 1)
    assert num_free(cache) == 6
