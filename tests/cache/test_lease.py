"""A lease: what it holds from open to close, and who owns each page and slot after every call.

Pages hold two tokens and are written as letters; the caches of these tests audit themselves after every action.
"""

import pytest

from hybrid.errors import OwnershipError
from hybrid.memory.pool import EMPTY_STATE
from support.caches import AuditedCache, audited_cache, key_of, prefill, release, serve, start


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=16, num_states=8)


# Open


def test_a_cold_request_reads_the_empty_state_and_writes_its_own(cache: AuditedCache) -> None:
    lease = cache.open(key_of(cache, "ab"), 3, 0)
    assert lease is not None
    assert (lease.read_slot, lease.front_tokens, lease.num_hit_tokens) == (EMPTY_STATE, 0, 0)
    assert lease.front != EMPTY_STATE
    assert (list(lease.block_table), lease.num_shared, lease.page_lock, lease.state_lock) == ([], 0, None, None)


def test_a_hit_maps_the_pages_of_the_tree_and_reads_its_checkpoint(cache: AuditedCache) -> None:
    first = prefill(cache, key_of(cache, "ab"))
    pages = list(first.block_table)
    cache.close(first)
    lease = start(cache, key_of(cache, "abc"))
    assert (lease.num_hit_tokens, lease.front_tokens, lease.num_shared) == (4, 4, 2)
    assert list(lease.block_table[:2]) == pages
    assert lease.read_slot == cache.tree.peek(key_of(cache, "ab"), 4).checkpoint.slot
    assert lease.front != lease.read_slot
    assert (lease.page_lock is not None, lease.state_lock is not None) == (True, True)


def test_a_hit_of_pages_alone_starts_from_nothing_and_shares_them(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abc"))
    cache.evict_checkpoints(1)
    lease = start(cache, key_of(cache, "abcd"))
    assert (lease.num_hit_tokens, lease.num_shared, lease.branching_len) == (0, 3, 6)
    assert lease.read_slot == EMPTY_STATE


def test_open_takes_the_pages_it_is_asked_for_or_nothing(cache: AuditedCache) -> None:
    lease = cache.open(key_of(cache, "a" * 15), 29, 29)
    assert lease is not None and len(lease.block_table) == 15
    before = cache.stats()
    assert cache.open(key_of(cache, "bb"), 3, 4) is None
    assert cache.stats() == before
    assert cache.leases == {lease}


def test_open_answers_none_when_no_slot_can_be_had_and_locks_nothing(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    leases = [start(cache, key_of(cache, "x")) for _ in range(7)]
    assert leases[0].front != EMPTY_STATE
    assert cache.open(key_of(cache, "abc"), 5, 6) is None  # the last slot is the checkpoint that it would read
    assert cache.tree.peek(key_of(cache, "ab"), 4).num_tokens == 4
    cache.close(leases[0])
    assert start(cache, key_of(cache, "abc")).num_hit_tokens == 4


def test_an_open_that_is_refused_counts_as_no_use_of_the_checkpoint(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "a"))
    serve(cache, key_of(cache, "b"))
    start(cache, key_of(cache, "x" * 13))
    assert cache.open(key_of(cache, "ayyy"), 7, 8) is None
    assert cache.tree.peek(key_of(cache, "a"), 2).checkpoint.usage.hits == 0


# Reserve


def test_reserve_takes_whole_pages_and_never_gives_any_back(cache: AuditedCache) -> None:
    lease = cache.open(key_of(cache, "abcd"), 7, 0)
    assert lease is not None
    for num_tokens, num_pages in ((1, 1), (2, 1), (3, 2), (0, 2), (8, 4), (7, 4)):
        assert cache.reserve(lease, num_tokens)
        assert len(lease.block_table) == num_pages


def test_reserve_evicts_what_it_needs_and_no_more(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcdefgh"))
    serve(cache, key_of(cache, "ijklmnop"))
    lease = cache.open(key_of(cache, "xyz"), 5, 6)
    assert lease is not None
    assert cache.stats().evicted_pages == 3
    assert cache.tree.peek(key_of(cache, "abcdefgh"), 16).num_page_tokens == 10


def test_reserve_that_cannot_succeed_evicts_nothing(cache: AuditedCache) -> None:
    running = prefill(cache, key_of(cache, "abcdefgh"))
    serve(cache, key_of(cache, "ijkl"))
    lease = cache.open(key_of(cache, "x"), 1, 2)
    assert lease is not None
    before = cache.stats()
    assert not cache.reserve(lease, 2 * 9)  # 3 free, 4 cached, 8 in use
    assert (cache.stats(), len(lease.block_table)) == (before, 1)
    assert cache.reserve(lease, 2 * 8)
    assert running.block_table[:8] == cache.tree.pages(running.page_lock.node, 16)


def test_reserve_does_not_evict_pages_that_its_own_lease_maps(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcdefgh"))
    lease = start(cache, key_of(cache, "abcdefghi"))
    assert not cache.reserve(lease, 2 * 17)
    assert cache.reserve(lease, 2 * 16)
    assert cache.stats().evicted_pages == 0


# Copy-on-write


def test_the_checkpoint_is_locked_until_the_first_pass_has_read_it(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    lease = start(cache, key_of(cache, "abc"))
    slot = lease.read_slot
    cache.clear()
    assert cache.tree.peek(key_of(cache, "ab"), 4).checkpoint.slot == slot
    cache.advance(lease, 6)
    assert (lease.read_slot, lease.front_tokens, lease.state_lock) == (lease.front, 6, None)
    cache.clear()
    assert cache.tree.peek(key_of(cache, "ab"), 4).checkpoint is None
    assert cache.tree.peek(key_of(cache, "ab"), 4).num_page_tokens == 4  # the pages stay as long as the lease


def test_two_requests_read_one_checkpoint_and_write_their_own_slots(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    one, two = start(cache, key_of(cache, "abc")), start(cache, key_of(cache, "abd"))
    assert one.read_slot == two.read_slot
    assert len({one.front, two.front, one.read_slot}) == 3
    cache.advance(one, 6)
    assert two.state_lock.node.slot == two.read_slot


# Capture and commit


def test_a_commit_hands_pages_and_checkpoints_to_the_tree(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd", extra=1)
    lease = start(cache, key)
    assert cache.capture(lease, 4) is not None and cache.capture(lease, 8) is not None
    cache.advance(lease, 9)
    cache.commit(lease, key, 8)
    assert (lease.num_shared, len(lease.block_table), lease.captured) == (4, 5, [])
    assert [cache.tree.peek(key, limit).num_tokens for limit in (3, 4, 7, 8)] == [0, 4, 4, 8]
    assert lease.page_lock.node.end == 8


def test_a_checkpoint_beyond_the_commit_waits_for_the_next_one(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd")
    lease = start(cache, key)
    later = cache.capture(lease, 8)
    cache.capture(lease, 2)
    cache.advance(lease, 8)
    cache.commit(lease, key, 4)
    assert lease.captured == [later]
    assert cache.tree.peek(key, 8)[:2] == (2, 4)
    cache.commit(lease, key, 8)
    assert (lease.captured, cache.tree.peek(key, 8)[:2]) == ([], (8, 8))


def test_a_commit_of_what_is_shared_already_changes_nothing(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd")
    lease = prefill(cache, key)
    table, before = list(lease.block_table), cache.stats()
    cache.commit(lease, key, 8)
    cache.commit(lease, key, 4)
    cache.commit(lease, key, 0)
    assert (list(lease.block_table), lease.num_shared, cache.stats()) == (table, 4, before)


@pytest.mark.parametrize("num_tokens", [3, 10])
def test_a_commit_of_part_of_a_page_or_of_more_than_there_is_raises(cache: AuditedCache, num_tokens: int) -> None:
    key = key_of(cache, "abcdef")
    lease = cache.open(key, 11, 8)
    assert lease is not None
    with pytest.raises(OwnershipError, match="commit"):
        cache.commit(lease, key, num_tokens)
    assert (lease.num_shared, cache.tree.num_pages) == (0, 0)


def test_duplicates_are_freed_and_the_block_table_points_at_the_pages_of_the_tree(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd")
    one, two = start(cache, key), start(cache, key)
    assert set(one.block_table).isdisjoint(two.block_table)
    for lease in (one, two):
        cache.capture(lease, 8)
        cache.advance(lease, 8)
    cache.commit(one, key, 8)
    kept = list(one.block_table)
    cache.commit(two, key, 8)
    assert list(two.block_table) == kept == list(one.block_table)
    assert (two.num_shared, two.captured) == (4, [])
    stats = cache.stats()
    assert (stats.pages_cached, stats.pages_private, stats.checkpoints, stats.states_private) == (4, 0, 1, 2)


def test_only_the_duplicates_are_freed_where_two_requests_part(cache: AuditedCache) -> None:
    one, two = start(cache, key_of(cache, "abcd")), start(cache, key_of(cache, "abxyz"))
    own = list(two.block_table)
    for lease, key in ((one, key_of(cache, "abcd")), (two, key_of(cache, "abxyz"))):
        cache.advance(lease, len(key))
        cache.commit(lease, key, len(key))
    assert list(two.block_table) == list(one.block_table[:2]) + own[2:]
    assert cache.tree.num_pages == 7


def test_a_commit_under_another_key_than_the_shared_pages_were_found_by_is_refused(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab", "one"))
    lease = start(cache, key_of(cache, "abcd", "one"))
    assert lease.num_shared == 2
    cache.advance(lease, 8)
    for other in (key_of(cache, "abcd", "two"), key_of(cache, "axcd", "one")):
        with pytest.raises(OwnershipError):
            cache.commit(lease, other, 8)
    cache.commit(lease, key_of(cache, "abcd", "one"), 8)


# Close


def test_close_gives_everything_back(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    lease = start(cache, key_of(cache, "abcd"))
    cache.capture(lease, 6)
    cache.take_back(lease)
    cache.close(lease)
    stats = cache.stats()
    assert (stats.pages_private, stats.states_private, cache.leases) == (0, 0, set())
    release(cache)


def test_a_second_close_and_a_close_elsewhere_raise_and_change_nothing(cache: AuditedCache) -> None:
    lease, other = start(cache, key_of(cache, "ab")), audited_cache(4, 4)
    with pytest.raises(OwnershipError, match="another cache"):
        other.close(lease)
    cache.close(lease)
    with pytest.raises(OwnershipError, match="closed before"):
        cache.close(lease)


@pytest.mark.parametrize("action", ["reserve", "capture", "capture_spare", "take_back"])
def test_a_closed_lease_takes_nothing_any_more(cache: AuditedCache, action: str) -> None:
    lease = serve(cache, key_of(cache, "ab"))
    before = cache.stats()
    arguments = () if action == "take_back" else (4,)
    with pytest.raises(OwnershipError):
        getattr(cache, action)(lease, *arguments)
    assert cache.stats() == before


@pytest.mark.parametrize("computed", [3, 4])
def test_a_closed_lease_hands_nothing_on_any_more(cache: AuditedCache, computed: int) -> None:
    key = key_of(cache, "ab")
    lease = start(cache, key)
    cache.advance(lease, computed)
    cache.close(lease)
    for hand_on in (cache.advance, cache.donate_states):
        with pytest.raises(OwnershipError):
            hand_on(lease, 4)
    assert lease.captured == []
    with pytest.raises(OwnershipError):
        cache.commit(lease, key, 4)
    assert not cache.tree.knows("")
    release(cache)


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_pages_are_shared_from_the_first_that_is_committed(cache: AuditedCache, num_pages: int) -> None:
    key = key_of(cache, "abc")
    lease = cache.open(key, 5, 6)
    assert lease is not None
    cache.advance(lease, 6)
    cache.commit(lease, key, 2 * num_pages)
    assert (lease.num_shared, cache.tree.num_pages) == (num_pages, num_pages)
