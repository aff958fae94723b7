"""Bugs of other caches for hybrid models, numbered as they were collected: locks, requests, commits.

Eviction (11, 13 to 17, 23, 24) is in test_scenarios_eviction.py; what needs a model (6 in part, 7, 25, and 19 and 20 on
its side) is in test_engine_scenarios.py. The caches here audit themselves after every action; pages hold two tokens and
are written as letters.
"""

import pytest

from hybrid.errors import LockError, OwnershipError
from hybrid.key import Key
from hybrid.tree.node import Checkpoint
from support.caches import AuditedCache, Memory, TreeCase, audited_cache, key_of, prefill, release, serve, start


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=32, num_states=8)


def locked_pages(cache: AuditedCache) -> int:
    return cache.tree.locks.num_pages


def test_01_a_split_of_a_locked_node_keeps_both_halves_locked_and_the_state_lock_below(cache: AuditedCache) -> None:
    """A fork at b splits the node that a request holds.

    abcd *      abxy comes:     ab o
                                  cd *    page lock and state lock
                                  xy *
    """
    serve(cache, key_of(cache, "abcd"))
    lease = start(cache, key_of(cache, "abcde"))
    assert lease.state_lock is not None
    serve(cache, key_of(cache, "abxy"))
    lower = lease.state_lock.node
    assert lower is not None and lower.parent is not None
    assert (lower.end, lower.state_locks, lower.parent.end, lower.parent.state_locks) == (8, 1, 4, 0)
    assert locked_pages(cache) == 4
    cache.clear()
    assert cache.tree.peek(key_of(cache, "abcd"), 8)[:2] == (8, 8)
    cache.close(lease)
    assert locked_pages(cache) == 0
    release(cache)


def test_02_a_checkpoint_may_appear_on_a_locked_tombstone_before_the_unlock(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    cache.evict_checkpoints(1)
    lease = start(cache, key_of(cache, "abcde"))
    assert (lease.state_lock, lease.num_shared) == (None, 4)
    serve(cache, key_of(cache, "abcd"))
    node = lease.page_lock.node
    assert (node.slot is not None, node.page_locks, node.state_locks) == (True, 1, 0)
    cache.close(lease)
    assert (node.page_locks, node.state_locks) == (0, 0)
    release(cache)


def test_03_mispaired_double_and_stale_unlocks_raise_and_leave_the_cache_working(cache: AuditedCache) -> None:
    other = audited_cache(8, 4)
    serve(other, key_of(other, "ab"))
    serve(cache, key_of(cache, "ab"))
    ours, theirs = start(cache, key_of(cache, "abc")), start(other, key_of(other, "abc"))
    assert ours.page_lock is not None and ours.state_lock is not None and theirs.page_lock is not None
    stale = ours.state_lock
    with pytest.raises(LockError):
        cache.tree.unlock(theirs.page_lock)
    cache.advance(ours, 6)
    for _ in range(2):
        with pytest.raises(LockError):
            cache.tree.unlock(stale)
        cache.audit()
    other.audit()
    cache.close(ours)
    assert start(cache, key_of(cache, "abc")).num_hit_tokens == 4


def test_04_with_every_slot_taken_eviction_spares_the_matched_checkpoint_and_the_request_waits() -> None:
    cache = audited_cache(num_pages=32, num_states=3)
    serve(cache, key_of(cache, "ab"))
    serve(cache, key_of(cache, "xy"))
    one = start(cache, key_of(cache, "abc"))  # the slots: two checkpoints and one front
    two = start(cache, key_of(cache, "abd"))  # its front takes the checkpoint of xy, not the one it matched
    assert two.num_hit_tokens == 4
    assert cache.tree.peek(key_of(cache, "xy"), 4).num_tokens == 0
    assert cache.open(key_of(cache, "abe"), 5, 6) is None
    assert (cache.capture(one, 6), cache.take_back(two)) == (None, False)
    cache.close(one)
    assert start(cache, key_of(cache, "abe")).num_hit_tokens == 4


def test_05_when_admission_fails_after_match_and_slot_everything_goes_back(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    running = start(cache, key_of(cache, "x" * 28))
    before = cache.stats()
    assert cache.open(key_of(cache, "abcdef"), 11, 12) is None
    assert cache.stats() == before
    assert (cache.leases, locked_pages(cache)) == ({running}, 0)
    release(cache)


@pytest.mark.parametrize("moment", range(9))
def test_06_an_abort_at_any_point_gives_everything_back(cache: AuditedCache, moment: int) -> None:
    serve(cache, key_of(cache, "ab"))
    key = key_of(cache, "abcd", extra=1)
    lease = start(cache, key)
    steps = (
        lambda: cache.capture(lease, 6),
        lambda: cache.advance(lease, 8),
        lambda: cache.commit(lease, key, 4),
        lambda: cache.commit(lease, key, 8),
        lambda: cache.take_back(lease),
        lambda: cache.swap(lease),
        lambda: cache.advance(lease, 9),
        lambda: cache.donate_states(lease, 9),
    )
    for step in steps[:moment]:
        step()
    cache.close(lease)
    stats = cache.stats()
    assert (stats.pages_private, stats.states_private, locked_pages(cache)) == (0, 0, 0)
    release(cache)


def test_06_a_late_step_result_of_a_dead_request_writes_nowhere(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd")
    dead = start(cache, key)
    cache.capture(dead, 8)
    cache.close(dead)
    alive = start(cache, key_of(cache, "wxyz"))  # the same pages and slots, handed out again
    before = (list(alive.block_table), alive.front, alive.front_tokens, cache.stats())
    for late in (cache.advance, cache.donate_states):
        with pytest.raises(OwnershipError):
            late(dead, 8)
    with pytest.raises(OwnershipError):
        cache.commit(dead, key, 8)
    assert (list(alive.block_table), alive.front, alive.front_tokens, cache.stats()) == before
    assert not cache.tree.knows("")


@pytest.mark.parametrize(("limit", "usable"), [(8, 8), (7, 6), (6, 6), (5, 0)])
def test_08_of_states_beyond_the_final_key_none_is_kept(cache: AuditedCache, limit: int, usable: int) -> None:
    """The front is at 8, the back at 6; a stop string leaves `limit` tokens of the key."""
    key = key_of(cache, "abcd")
    lease = start(cache, key)
    cache.advance(lease, 6)
    cache.take_back(lease)
    cache.swap(lease)
    cache.advance(lease, 8)
    cache.donate_states(lease, limit)
    cache.commit(lease, key, limit // 2 * 2)
    cache.close(lease)
    assert cache.tree.peek(key, 8)[:2] == (usable, limit // 2 * 2)
    release(cache)


def test_08_a_checkpoint_captured_beyond_the_final_key_is_given_back(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd")
    lease = start(cache, key)
    cache.capture(lease, 4)
    cache.capture(lease, 8)
    cache.advance(lease, 8)
    cache.commit(lease, key, 6)
    cache.close(lease)
    assert cache.tree.peek(key, 8)[:2] == (4, 6)
    release(cache)


def test_09_pages_and_states_of_different_lengths_are_refused_and_nothing_is_attached() -> None:
    case = TreeCase(page_size=2, grid=2)
    key = case.key("abcd")
    for num_tokens, num_pages, captured in ((8, 4, 6), (6, 3, 8), (8, 3, 8), (6, 4, 6)):
        with pytest.raises(OwnershipError):
            case.tree.insert(key, num_tokens, list(range(num_pages)), Checkpoint(1, captured))
        assert case.draw() == []


def test_10_a_key_cut_inside_a_page_shares_whole_pages_only(cache: AuditedCache) -> None:
    key = key_of(cache, "abc", extra=1)
    serve(cache, key)
    assert cache.tree.peek(key, 7)[:2] == (6, 6)
    lease = start(cache, key)
    assert (lease.num_shared, len(lease.block_table)) == (3, 4)
    cache.advance(lease, 7)
    with pytest.raises(OwnershipError):
        cache.commit(lease, key, 7)
    cache.commit(lease, key, 6)
    cut = Key.of([*key_of(cache, "ab").ids[::4], 0])  # differs from abc inside the third page
    assert cache.tree.peek(cut, 5).num_page_tokens == 4
    assert all(len(node.pages) > 0 for _, node in cache.tree.nodes())


def test_12_the_same_key_twice_frees_pages_and_checkpoint_once_and_points_the_request_at_the_first(
    cache: AuditedCache,
) -> None:
    key = key_of(cache, "abcd")
    one, two = start(cache, key), start(cache, key)
    for lease in (one, two):
        cache.capture(lease, 8)
        cache.advance(lease, 8)
    for _ in range(2):
        for lease in (one, two):
            cache.commit(lease, key, 8)
    assert one.block_table == two.block_table
    stats = cache.stats()
    assert (stats.pages_cached, stats.pages_private, stats.checkpoints, stats.states_private) == (4, 0, 1, 2)
    release(cache)


def test_18_namespaces_never_meet_empty_ones_go_and_a_match_makes_none(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abc", "one"))
    two = start(cache, key_of(cache, "abcd", "two"))
    assert (two.num_hit_tokens, two.num_shared) == (0, 0)
    cache.close(two)
    assert (cache.tree.knows("one"), cache.tree.knows("two")) == (True, False)
    assert start(cache, key_of(cache, "abcd", "one")).num_hit_tokens == 6
    release(cache)
    assert not cache.tree.knows("one")


def test_19_a_hit_of_the_full_prompt_leaves_a_token_to_compute_and_writes_no_shared_page(cache: AuditedCache) -> None:
    key, memory = key_of(cache, "abcd"), Memory(cache)
    first = start(cache, key)
    for position in (6, 8):
        cache.capture(first, position)
    memory.forward(first, key, 8, first.front)
    cache.advance(first, 8)
    cache.commit(first, key, 8)
    cache.close(first)
    again = start(cache, key)
    assert again.num_hit_tokens == 6
    shared = {page: memory.pages[page] for page in again.block_table[: again.num_shared]}
    memory.forward(again, key, 8, again.front)
    assert {page: memory.pages[page] for page in shared} == shared
    cache.advance(again, 8)
    cache.commit(again, key, 8)
    cache.close(again)
    memory.check()
    release(cache)


def test_20_two_siblings_in_one_step_write_their_own_pages_and_share_them_afterwards(cache: AuditedCache) -> None:
    memory, texts = Memory(cache), ("abcx", "abcy")
    leases = [start(cache, key_of(cache, text)) for text in texts]
    assert set(leases[0].block_table).isdisjoint(leases[1].block_table)
    for lease, text in zip(leases, texts, strict=True):
        cache.capture(lease, 6)
        memory.forward(lease, key_of(cache, text), 8, lease.front)
    for lease, text in zip(leases, texts, strict=True):
        cache.advance(lease, 8)
        cache.commit(lease, key_of(cache, text), 8)
        memory.check()
    assert leases[0].block_table[:3] == leases[1].block_table[:3]
    assert leases[0].block_table[3] != leases[1].block_table[3]
    release(cache)


def test_a_request_behind_another_hits_what_that_one_has_committed_while_it_still_runs(cache: AuditedCache) -> None:
    running = prefill(cache, key_of(cache, "abcd"))
    behind = start(cache, key_of(cache, "abcde"))
    assert (behind.num_hit_tokens, behind.block_table[:4]) == (8, running.block_table[:4])
    cache.close(running)
    cache.clear()
    assert cache.tree.peek(key_of(cache, "abcd"), 8).num_tokens == 8
    release(cache)


# 22: tokens that are one thing


def of_units(text: str, units: list[tuple[int, int]]) -> Key:
    return Key.of([ord(letter) for letter in text for _ in range(2)], units=units)


def test_22_no_match_ends_inside_an_image(cache: AuditedCache) -> None:
    """ab IIII cd: the image fills tokens [4, 12). A prompt that shares half of it shares nothing of it."""
    image = [(4, 12)]
    first = of_units("abIJKLcd", [])  # who commits need not know the units
    lease = start(cache, first)
    for position in (4, 8, 12, 16):
        cache.capture(lease, position)
    cache.advance(lease, 16)
    cache.commit(lease, first, 16)
    cache.close(lease)
    for text, page_hit, usable in (
        ("abIJKLcx", 14, 12),  # leaves after the image
        ("abIJKLxx", 12, 12),  # right behind it
        ("abIJKxcd", 4, 4),  # inside
        ("abIJxxcd", 4, 4),  # inside, where a checkpoint lies
        ("abxxxxcd", 4, 4),  # before
        ("axIJKLcd", 2, 0),
    ):
        found = cache.tree.peek(of_units(text, image), 16)
        assert (text, found.num_page_tokens, found.num_tokens) == (text, page_hit, usable)
        assert found.branching_len is None or not 4 < found.branching_len < 12
    assert cache.tree.peek(Key.of(memoryview(of_units("abIJKx", []).ids).cast("i").tolist()), 12)[:2] == (8, 10)
    release(cache)


def test_22_a_limit_inside_an_image_is_as_good_as_one_before_it(cache: AuditedCache) -> None:
    serve(cache, of_units("abIJKLcd", [(4, 12)]))
    for limit in range(17):
        found = cache.tree.peek(of_units("abIJKLcd", [(4, 12), (14, 16)]), limit)
        assert not 4 < found.num_page_tokens < 12
        assert not 14 < found.num_page_tokens < 16
        assert found.num_page_tokens <= limit
        assert found.num_tokens <= found.num_page_tokens
        assert (found.deepest is None) == (found.num_page_tokens == 0)
        if found.deepest is not None:
            assert found.deepest.end >= found.num_page_tokens
            parent = found.deepest.parent
            assert parent is not None and parent.end < found.num_page_tokens
    release(cache)


def test_22_the_same_image_in_another_place_or_another_image_is_another_prefix(cache: AuditedCache) -> None:
    serve(cache, of_units("abIJKLcd", [(4, 12)]))
    lease = start(cache, of_units("abOPQRcd", [(4, 12)]))
    assert lease.num_hit_tokens <= 4
    assert lease.num_shared == 2
    cache.close(lease)
    release(cache)
