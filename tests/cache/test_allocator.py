"""The evictions of the allocator: as much as is needed, and nothing where it does not suffice."""

import pytest

from hybrid.cache.allocator import UnevictableSlots
from support.caches import AuditedCache, key_of, release, start
from support.elastic import ONE, elastic, held


def keep_pages(cache: AuditedCache, text: str) -> None:
    """Pages of the tree without a checkpoint."""
    key = key_of(cache, text)
    lease = start(cache, key)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key))
    cache.close(lease)


def test_for_a_state_only_the_pages_of_one_piece_are_evicted_less_those_that_are_free() -> None:
    """Five pieces of four pages: the empty state, two fronts, and two of pages, of which one is free."""
    cache = elastic(5, ONE)
    keep_pages(cache, "abcdef")
    first, second = start(cache, key_of(cache, "x")), cache.open(key_of(cache, "y"), 1, 0)
    assert second is not None
    assert cache.memory.arena is not None
    assert (cache.memory.arena.num_free, cache.memory.pages.num_free) == (0, 1)
    assert cache.take_back(second)
    assert cache.stats().evicted_pages == 3
    assert cache.stats().pages_cached == 3
    for lease in (first, second):
        cache.close(lease)
    release(cache)


def test_every_slot_of_a_request_counts_and_not_its_front_alone() -> None:
    """Nine pieces: the empty state, a front, a back and two captured states leave four of pages: sixteen."""
    cache = elastic(9, ONE)
    keep_pages(cache, "abcd")
    lease = cache.open(key_of(cache, "x" * 20), 39, 0)
    assert lease is not None
    assert cache.take_back(lease)
    assert cache.capture(lease, 2) is not None and cache.capture(lease, 4) is not None
    before = held(cache)
    assert not cache.reserve(lease, 2 * 17)
    assert held(cache) == before
    assert cache.reserve(lease, 2 * 16)
    cache.close(lease)
    release(cache)


def test_slots_that_are_given_back_do_not_count_any_more() -> None:
    cache = elastic(9, ONE)
    lease = cache.open(key_of(cache, "x" * 40), 79, 2)
    assert lease is not None
    assert cache.capture(lease, 2) is not None
    cache.advance(lease, 2)
    assert not cache.reserve(lease, 2 * 25)
    cache.commit(lease, key_of(cache, "x" * 40), 2)  # the checkpoint can be evicted now
    assert cache.reserve(lease, 2 * 28)
    cache.close(lease)
    release(cache)


def test_discarded_slots_do_not_count_any_more() -> None:
    cache = elastic(9, ONE)
    lease, other = cache.open(key_of(cache, "x" * 8), 15, 0), cache.open(key_of(cache, "y" * 40), 79, 0)
    assert lease is not None and other is not None
    assert cache.capture(lease, 2) is not None
    assert not cache.reserve(other, 2 * 21)
    cache.discard(lease)
    assert cache.reserve(other, 2 * 24)
    cache.close(lease)
    cache.close(other)
    release(cache)


@pytest.mark.parametrize("per_piece", [1, 2, 3])
def test_slots_that_stay_are_counted_by_piece(per_piece: int) -> None:
    """Against a set, through every order of a few slots."""
    slots = UnevictableSlots(per_piece, 1)
    model = {0}
    for step in range(60):
        slot = 1 + step * 7 % 11
        if slot in model:
            model.remove(slot)
            slots.remove([slot])
        else:
            model.add(slot)
            slots.add(slot)
        pieces = {one // per_piece for one in model}
        counts = [sum(one // per_piece == piece for one in model) for piece in pieces]
        assert slots.num_pieces == len(pieces)
        assert slots.num_partial == sum(count < per_piece for count in counts)
        assert all(slots.are_in(piece) == (piece in pieces) for piece in range(12))
