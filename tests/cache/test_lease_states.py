"""A lease's own states: checkpoints it captures, its ping-pong pair, and what it donates in the end.

Pages hold two tokens and are written as letters; the caches of these tests audit themselves after every action.
"""

import pytest

from hybrid.tree.node import Kind
from support.caches import AuditedCache, audited_cache, key_of, release, serve, start


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=16, num_states=8)


def test_capture_degrades_to_none_and_never_takes_what_is_in_use() -> None:
    cache = audited_cache(num_pages=8, num_states=2)
    serve(cache, key_of(cache, "ab"))
    lease = start(cache, key_of(cache, "abc"))
    assert cache.capture(lease, 6) is None
    assert not cache.take_back(lease)
    cache.advance(lease, 5)
    assert cache.capture(lease, 6) is not None  # the checkpoint it has read may be evicted now


def test_spare_checkpoints_evict_nothing_and_leave_a_quarter_of_the_slots_free(cache: AuditedCache) -> None:
    lease = start(cache, key_of(cache, "abcdefgh"))
    taken = [cache.capture_spare(lease, 2 * (n + 1)) for n in range(8)]
    assert [checkpoint is not None for checkpoint in taken] == [True] * 5 + [False] * 3
    assert cache.memory.states.num_free == 2
    assert all(checkpoint.kind == Kind.INTERVAL for checkpoint in lease.captured)
    assert cache.capture(lease, 16) is not None


# The ping-pong pair


def test_a_swap_exchanges_front_and_back_and_keeps_the_state_before(cache: AuditedCache) -> None:
    key = key_of(cache, "ab", extra=1)
    lease = start(cache, key)
    cache.advance(lease, 4)
    old = lease.front
    assert cache.take_back(lease)
    new = lease.back
    assert cache.take_back(lease) and lease.back == new
    cache.swap(lease)
    cache.advance(lease, 5)
    assert (lease.front, lease.front_tokens, lease.read_slot) == (new, 5, new)
    assert (lease.back, lease.back_tokens) == (old, 4)


def test_the_deepest_state_on_the_grid_is_donated_without_a_copy(cache: AuditedCache) -> None:
    key = key_of(cache, "abc", extra=1)
    lease = start(cache, key)
    cache.advance(lease, 4)
    cache.take_back(lease)
    cache.swap(lease)
    cache.advance(lease, 6)
    front = lease.front
    cache.donate_states(lease, 7)
    cache.commit(lease, key, 6)
    assert cache.tree.peek(key, 7).checkpoint.slot == front
    cache.close(lease)
    assert (cache.stats().checkpoints, cache.stats().states_private) == (1, 0)


def test_the_back_is_donated_when_the_front_is_off_the_grid_or_too_far(cache: AuditedCache) -> None:
    for front_tokens, limit in ((5, 5), (6, 5)):
        key = key_of(cache, "abc" if limit == 5 else "xyz")
        lease = start(cache, key)
        cache.advance(lease, 4)
        cache.take_back(lease)
        cache.swap(lease)
        cache.advance(lease, front_tokens)
        old = lease.back
        cache.donate_states(lease, limit)
        cache.commit(lease, key, 4)
        assert cache.tree.peek(key, 6).checkpoint.slot == old
        cache.close(lease)
        cache.clear()


@pytest.mark.parametrize(
    ("back_tokens", "front_tokens", "limit"),
    [
        (3, 5, 6),  # both off the grid
        (3, 6, 2),  # the front too far as well
        (4, 6, 3),  # both too far
    ],
)
def test_no_state_is_donated_that_lies_off_the_grid_or_beyond_the_limit(
    cache: AuditedCache, back_tokens: int, front_tokens: int, limit: int
) -> None:
    key = key_of(cache, "abc")
    lease = start(cache, key)
    cache.advance(lease, back_tokens)
    cache.take_back(lease)
    cache.swap(lease)
    cache.advance(lease, front_tokens)
    cache.donate_states(lease, limit)
    assert lease.captured == []
    cache.commit(lease, key, front_tokens // 2 * 2)
    cache.close(lease)


def test_a_state_that_was_never_written_is_not_donated(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    warm, cold = start(cache, key_of(cache, "abc")), start(cache, key_of(cache, "xy"))
    for lease in (warm, cold):
        cache.take_back(lease)
        cache.donate_states(lease, 6)
        assert lease.captured == []


def test_a_state_is_donated_once_however_often_it_is_offered(cache: AuditedCache) -> None:
    key = key_of(cache, "ab")
    lease = start(cache, key)
    cache.advance(lease, 4)
    cache.donate_states(lease, 4)
    cache.donate_states(lease, 4)
    assert len(lease.captured) == 1
    cache.commit(lease, key, 4)
    cache.donate_states(lease, 4)
    cache.commit(lease, key, 4)
    cache.close(lease)
    release(cache)
