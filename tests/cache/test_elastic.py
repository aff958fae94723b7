"""One budget for pages and checkpoints: pieces go from one kind to the other; what cannot suffice evicts nothing."""

import pytest

from hybrid.errors import MemoryBudgetError
from hybrid.memory.arena import PieceLayout
from hybrid.memory.memory import CacheMemory
from support.caches import key_of, release, serve
from support.elastic import ONE, THREE, TWO, elastic, finish, held, run


def test_the_layouts_are_those_that_the_tests_speak_of() -> None:
    assert [PieceLayout.of(*sizes)[1:3] for sizes in (ONE, TWO, THREE)] == [(4, 1), (3, 2), (2, 3)]


# From one kind to the other


@pytest.mark.parametrize("sizes", [ONE, TWO, THREE])
def test_pages_push_out_checkpoints_and_checkpoints_push_out_pages_and_back(sizes: tuple[int, int]) -> None:
    cache = elastic(10, sizes)
    for _ in range(3):
        for letter in "abcdefghijklmnopqrstuvwxyz":
            serve(cache, key_of(cache, letter))
        small = cache.stats()
        assert small.checkpoints >= 4
        for letter in "ABC":
            serve(cache, key_of(cache, letter * (cache.largest_request - 1)))
        large = cache.stats()
        assert large.pages_cached > 26 > small.pages_cached or large.pages_cached > large.pages_total / 2
        assert large.checkpoints < small.checkpoints
        assert large.evicted_checkpoints > small.evicted_checkpoints
    release(cache)


def test_a_state_gets_the_piece_of_as_many_pages_as_are_not_free_in_others_and_of_no_more() -> None:
    """Ten pages are in three pieces of four: where two go, the rest is moved together, and a piece is free."""
    cache = elastic(5, ONE)
    text = "abcdefghij"
    lease = run(cache, text)
    cache.commit(lease, key_of(cache, text), 20)
    cache.close(lease)
    for evicted in (0, 2):
        assert cache.open(key_of(cache, "x"), 1, 0) is not None
        assert (cache.stats().evicted_pages, cache.stats().pages_cached) == (evicted, 10 - evicted)
    release(cache)


def test_the_whole_budget_can_serve_one_long_prompt() -> None:
    cache = elastic(8, ONE)
    assert cache.largest_request == 20  # of eight pieces: the empty state, a front, the checkpoint that it reads
    for letter in "abcdefg":
        serve(cache, key_of(cache, letter))
    lease = cache.open(key_of(cache, "x" * 20), 39, 40)
    assert lease is not None
    assert len(set(lease.block_table)) == 20
    cache.close(lease)
    release(cache)


@pytest.mark.parametrize("sizes", [ONE, TWO, THREE])
def test_the_largest_request_runs_when_it_is_alone_whatever_is_kept(sizes: tuple[int, int]) -> None:
    cache = elastic(6, sizes)
    leases = [run(cache, letter) for letter in "abcd"]
    for lease, letter in zip(leases, "abcd", strict=True):
        finish(cache, lease, letter)  # their fronts lie beside each other as checkpoints now
    num_tokens = 2 * cache.largest_request
    assert cache.largest_request >= cache.stats().pages_total / 2
    lease = cache.open(key_of(cache, "x" * cache.largest_request), num_tokens - 1, num_tokens)
    assert lease is not None
    cache.close(lease)
    release(cache)


def test_a_budget_that_holds_no_request_is_refused_and_the_smallest_that_does_is_named() -> None:
    """A page and two states; the piece of the empty state comes on top."""
    with pytest.raises(MemoryBudgetError, match=r"one request needs 768 bytes"):
        CacheMemory.of_bytes(767, *ONE)
    assert CacheMemory.of_bytes(768, *ONE).largest_request == 4


# What cannot suffice evicts nothing


def test_more_pages_than_there_can_be_evict_nothing() -> None:
    cache = elastic(8, ONE)
    for letter in "abc":
        serve(cache, key_of(cache, letter))
    before = held(cache)
    assert cache.open(key_of(cache, "x" * 25), 49, 50) is None
    assert held(cache) == before


def test_pages_that_pins_and_requests_leave_no_room_for_evict_nothing() -> None:
    cache = elastic(8, ONE)
    for text in ("abc", "d", "e"):
        serve(cache, key_of(cache, text))
    cache.pin(key_of(cache, "abc"))
    other = run(cache, "x" * 4)
    lease = cache.open(key_of(cache, "y"), 1, 0)
    assert lease is not None
    before = held(cache)
    # Eight pieces: the empty state, the pinned checkpoint, two fronts, and four of pages, of which seven are taken.
    assert not cache.reserve(lease, 2 * 10)
    assert held(cache) == before
    assert cache.reserve(lease, 2 * 9)
    for one in (other, lease):
        cache.close(one)


def test_a_pinned_record_counts_as_memory_that_cannot_be_had() -> None:
    cache = elastic(8, ONE, stored_bytes=64)
    for letter in "abcde":
        serve(cache, key_of(cache, letter))
    cache.pin(key_of(cache, "a"))
    lease = cache.open(key_of(cache, "z"), 1, 0)
    assert lease is not None
    before = held(cache)
    # The empty state, the front and the piece of the record leave five pieces, where one page is pinned.
    assert not cache.reserve(lease, 2 * 20)
    assert held(cache) == before
    assert cache.reserve(lease, 2 * 19)


def test_fronts_that_lie_scattered_count_with_their_whole_pieces() -> None:
    """Slots 1 and 2 lie in piece 0, slot 3 in piece 1: a front there keeps that piece from the pages."""
    cache = elastic(6, THREE)
    one, two, three = (cache.open(key_of(cache, letter), 1, 0) for letter in "abc")
    assert one is not None and two is not None and three is not None
    assert (one.front, two.front, three.front) == (1, 2, 3)
    cache.close(one)
    cache.close(two)
    for letter in "de":
        finish(cache, run(cache, letter), letter)
    before = held(cache)
    assert not cache.reserve(three, 2 * 9)  # the other four pieces hold eight pages
    assert held(cache) == before
    assert cache.reserve(three, 2 * 8)


def test_a_state_that_cannot_be_had_evicts_nothing() -> None:
    """Four pieces: the empty state, a front, and two of pages that are all in use but for those of one small prefix."""
    cache = elastic(4, ONE)
    serve(cache, key_of(cache, "a"))
    lease = cache.open(key_of(cache, "b"), 1, 2)
    assert lease is not None
    assert cache.reserve(lease, 2 * 7)
    before = held(cache)
    assert cache.open(key_of(cache, "c"), 1, 2) is None
    assert held(cache) == before
