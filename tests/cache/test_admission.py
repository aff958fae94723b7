"""Admission: whether a new checkpoint is kept where memory is full."""

import pytest

import hybrid
from hybrid import CacheConfig, CacheMemory
from support.caches import AuditedCache, Contents, key_of, prefill, start


class LongestKept(hybrid.Policy):
    """Evict the checkpoint of the shortest prompt first."""

    def rank(self, facts: hybrid.Facts) -> float:
        return facts.num_tokens


FIXED = CacheMemory.of_indices, {"num_pages": 16, "num_states": 2}
SHARED = CacheMemory.of_bytes, {"memory": 6 * 64, "page_bytes": 16, "state_bytes": 64, "mover": Contents()}
"""Two state slots; or six pieces of four pages or a state, of which slot 0 takes one."""


def full(memory: CacheMemory) -> AuditedCache:
    """A cache with a checkpoint after 8 tokens, and no free memory for another one once a request has begun."""
    cache = AuditedCache(memory, CacheConfig(page_size=2, chunk_size=2, eviction=LongestKept()))
    cache.close(prefill(cache, key_of(cache, "abcd")))
    return cache


def leave_a_tail(cache: AuditedCache) -> None:
    """Pages without a checkpoint: they save no computation."""
    key = key_of(cache, "xyzw")
    lease = start(cache, key)
    cache.advance(lease, 8)
    cache.commit(lease, key, 8)
    cache.close(lease)


def kept(cache: AuditedCache, text: str) -> bool:
    """Tell whether a checkpoint one page beyond a prompt is kept. The rest of the memory is taken first."""
    key = key_of(cache, text)
    lease = start(cache, key)
    cache.advance(lease, len(key))
    while cache.memory.arena is not None and cache.memory.checkpoints.num_free:
        assert cache.reserve(lease, (len(lease.block_table) + 4) * 2)
    return cache.capture(lease, len(key) + 2) is not None


@pytest.mark.parametrize(("make", "sizes"), [FIXED, SHARED])
def test_a_checkpoint_worth_less_than_the_one_evicted_for_it_is_not_kept(make: object, sizes: dict[str, int]) -> None:
    assert not kept(full(make(**sizes)), "pq")
    assert kept(full(make(**sizes)), "pqr")  # as much
    assert kept(full(make(**sizes)), "pqrs")


def test_pages_that_save_nothing_make_room_for_a_checkpoint_where_memory_is_shared() -> None:
    cache = full(SHARED[0](**SHARED[1]))
    leave_a_tail(cache)
    assert kept(cache, "pq")
    assert cache.tree.num_checkpoints == 1


def test_pages_do_not_make_room_for_a_checkpoint_where_states_have_slots_of_their_own() -> None:
    cache = full(FIXED[0](**FIXED[1]))
    leave_a_tail(cache)
    assert not kept(cache, "pq")
