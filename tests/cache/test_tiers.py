"""Host memory behind the cache: what the tree evicts comes back when a request needs it, whole or not at all."""

from typing import Any

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import make_cache
from hybrid.errors import ArgumentError, AuditError, MemoryBudgetError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from support.caches import AuditedCache, Contents, Memory, RandomWorkload, compute, contents_of, evict, key_of, release
from support.planted import Planted, PlantedError

PAGE_BYTES, STATE_BYTES = 64, 128


def cache_on(num_pages: int = 12, host: int = 100_000, stored_bytes: int = 0, **config: Any) -> AuditedCache:
    """A cache of few pages and states, with contents that a test can name, and host memory."""
    contents = Contents(stored_bytes)
    memory = CacheMemory.of_bytes(
        num_pages * PAGE_BYTES, PAGE_BYTES, STATE_BYTES, mover=contents, store=contents if stored_bytes else None
    )
    settings = {"page_size": 2, "chunk_size": 2, "eviction": "lru", **config}
    return AuditedCache(memory, CacheConfig(host=host, **settings))


def ask(cache: HybridCache, key: Key) -> str:
    """Open a request and close it; its explanation."""
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    Memory(cache).check()
    text = str(lease.explanation)
    cache.close(lease)
    return text


@pytest.mark.parametrize("stored_bytes", [0, 64])
def test_what_was_evicted_is_a_hit_and_says_where_from(stored_bytes: int) -> None:
    cache = cache_on(stored_bytes=stored_bytes)
    key = compute(cache, "abcd")
    evict(cache)
    text = ask(cache, key)
    assert text.startswith("8 of 9 tokens cached, pages up to 8")
    assert "8 tokens restored from host memory" in text
    stats = cache.stats()
    assert (stats.restored_checkpoints, stats.restored_tokens) == (1, 8)
    assert stats.checkpoints == 1


def test_what_is_there_already_is_not_written_again() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    evict(cache)
    written = cache.stats().host_bytes_written
    assert written > 0
    for _ in range(3):
        ask(cache, key)
        evict(cache)
    assert cache.stats().host_bytes_written == written
    assert cache.stats().host_bytes_offered > 3 * written


def test_a_state_whose_pages_are_on_the_device_comes_back_alone() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    cache.evict_checkpoints(1)
    reads = contents_of(cache).calls
    lease = cache.open(key, 8, 9)
    assert lease is not None and lease.explanation.restored is not None
    assert lease.num_hit_tokens == 8
    assert lease.explanation.restored.num_bytes == STATE_BYTES
    assert contents_of(cache).calls == reads + 1, "one state is written, and no page"
    cache.close(lease)


def test_the_deepest_checkpoint_with_all_its_pages_is_taken() -> None:
    cache = cache_on(num_pages=20)
    compute(cache, "ab")
    key = compute(cache, "abcdef")
    evict(cache)
    assert "12 tokens restored" in ask(cache, key)
    evict(cache)
    short = key_of(cache, "abcxyz", extra=1)
    assert "4 tokens restored" in ask(cache, short), "the pages of abc, and the checkpoint of ab"


def test_a_page_that_cannot_be_copied_takes_the_checkpoint_along() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    cache.evict_checkpoints(1)
    assert cache.stats().host_checkpoints == 1
    contents_of(cache).fails_at = contents_of(cache).calls + 2
    evict(cache)
    stats = cache.stats()
    assert (stats.tier_failures, stats.host_checkpoints, stats.host_pages, stats.host_bytes_used) == (1, 0, 0, 0)
    assert "0 of 9 tokens" in ask(cache, key)


def test_pages_that_no_checkpoint_needs_are_not_copied() -> None:
    cache = cache_on()
    compute(cache, "abcd")
    contents_of(cache).fails_at = contents_of(cache).calls + 1  # its checkpoint is lost
    evict(cache)
    stats = cache.stats()
    assert (stats.evicted_pages, stats.tier_failures) == (4, 1)
    assert (stats.host_pages, stats.host_bytes_written) == (0, 0)


def test_namespaces_share_nothing() -> None:
    cache = cache_on()
    compute(cache, "abcd", "one")
    evict(cache)
    lease = cache.open(key_of(cache, "abcd", "two", extra=1), 8, 9)
    assert lease is not None and lease.num_hit_tokens == 0
    cache.close(lease)
    assert cache.stats().restored_checkpoints == 0


def test_a_restore_that_is_slower_than_computing_is_not_done_and_says_so() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    evict(cache)
    for _ in range(50):
        cache.note_pass(10**9, 1e-6)  # a device that computes a token in no time
    lease = cache.open(key, 8, 9)
    assert lease is not None
    assert lease.num_hit_tokens == 0
    assert "the checkpoint at 8 in host memory is not restored: computing is faster" in str(lease.explanation)
    cache.close(lease)


def test_what_would_never_be_restored_is_not_written() -> None:
    cache = cache_on()
    for _ in range(50):
        cache.note_pass(10**9, 1e-6)
    compute(cache, "abcd")
    evict(cache)
    assert cache.stats().host_bytes_written == 0
    assert cache.stats().host_bytes_offered > 0


def test_one_slow_copy_is_forgotten() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    evict(cache)
    assert cache.tiers is not None and cache.tiers.host is not None
    cache.tiers.host.cost.note(1, 1e-2)  # a page fault, a garbage collection
    refusals = 0
    while "is not restored" in ask(cache, key):
        refusals += 1
    assert 10 < refusals < 2000
    assert cache.stats().restored_checkpoints == 1


def test_cleared_is_forgotten_in_host_memory_too() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    evict(cache)
    compute(cache, "xy")
    cache.clear()
    stats = cache.stats()
    assert (stats.host_bytes_used, stats.host_pages, stats.host_checkpoints) == (0, 0, 0)
    assert "0 of 9 tokens" in ask(cache, key)


def test_a_copy_that_fails_is_counted_and_the_eviction_continues() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    contents_of(cache).fails_at = contents_of(cache).calls + 1
    evict(cache)
    assert cache.stats().tier_failures == 1
    assert "0 of 9 tokens" in ask(cache, key)


@pytest.mark.parametrize("stored_bytes", [0, 64])
def test_a_restore_that_fails_anywhere_is_a_miss_with_a_reason_and_leaves_nothing(stored_bytes: int) -> None:
    for number in range(1, 6):  # four pages and a state
        cache = cache_on(stored_bytes=stored_bytes)
        key = compute(cache, "abcd")
        evict(cache)
        contents_of(cache).fails_at = contents_of(cache).calls + number
        lease = cache.open(key, 8, 9)
        assert lease is not None
        assert lease.num_hit_tokens == 0
        assert "restoring 8 tokens failed: planted" in str(lease.explanation)
        cache.close(lease)
        assert [*cache.tree.nodes()] == []
        assert cache.stats().tier_failures == 1
        assert "8 tokens restored" in ask(cache, key)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("host", [100_000, 300])
def test_an_eviction_that_fails_at_any_line_of_copying_leaves_the_tier_whole(host: int) -> None:
    """The unit that leaves is evicted all the same; a tier that the exception has left inconsistent is empty."""
    line, planted = 0, Planted(0)
    while not line or planted.was_raised:
        line += 1
        cache = cache_on(host=host)
        cache.tree.ghosts.limit = 0  # their failures are not the tiers'
        keys = [compute(cache, text) for text in ("ab", "abcd", "xyz")]
        planted = Planted(line, "tiers/host.py", "tiers/value.py", "tree/names.py", spares_locks=True)
        with planted.traced():
            cache.allocator.evict(cache.tree.evict_all)
        cache.audit()
        assert cache.stats().pages_cached == 0
        assert cache.stats().tier_failures == planted.was_raised
        for key in keys:
            ask(cache, key)
    assert line > 300


@pytest.mark.usefixtures("untraced")
def test_a_restore_that_fails_at_any_line_leaves_the_cache_whole_or_raises() -> None:
    """A miss with a reason is one after which the bookkeeping is in order."""
    line, planted = 0, Planted(0)
    while not line or planted.was_raised:
        line += 1
        contents = Contents(0)
        memory = CacheMemory.of_bytes(12 * PAGE_BYTES, PAGE_BYTES, STATE_BYTES, mover=contents)
        cache = HybridCache(memory, CacheConfig(page_size=2, chunk_size=2, eviction="lru", host=100_000))
        key = compute(cache, "abcd")
        cache.allocator.evict(cache.tree.evict_all)
        planted = Planted(line, "cache/restorer.py", "cache/commit.py", "cache/allocator.py", "tree", "memory")
        try:
            with planted.traced():
                lease = cache.open(key, 8, 9)
        except (PlantedError, AuditError):
            continue
        cache.audit()
        assert lease is not None
        assert planted.was_raised or lease.num_hit_tokens == 8
        cache.close(lease)
        ask(cache, key)
    assert line > 200


def test_a_memory_that_is_in_use_takes_nothing_back() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    evict(cache)
    other = key_of(cache, "u" * cache.largest_request)
    lease = cache.open(other, 8, len(other))
    assert lease is not None
    assert cache.open(key, 8, 9) is None
    assert [*cache.tree.nodes()] == []
    cache.close(lease)
    assert "8 tokens restored" in ask(cache, key)


def test_usage_survives() -> None:
    cache = cache_on()
    key = compute(cache, "abcd")
    for _ in range(3):
        ask(cache, key)
    evict(cache)
    ask(cache, key)
    node = cache.tree.peek(key, 8).checkpoint
    assert node is not None and node.usage.hits >= 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stored_bytes", [0, 64])
@pytest.mark.parametrize("host", [600, 100_000])
def test_contents_are_right_through_random_requests_evictions_and_restores(
    seed: int, stored_bytes: int, host: int
) -> None:
    cache = cache_on(num_pages=24, host=host, stored_bytes=stored_bytes, eviction=("lru", "lhd")[seed % 2])
    workload = RandomWorkload(cache, seed, has_faults=seed % 3 == 2)
    workload.run(300)
    workload.memory.check()
    assert cache.stats().host_bytes_used <= host
    if host > 600:
        assert cache.stats().restored_checkpoints > 0
    release(cache)


def test_a_cache_that_is_off_has_no_host_memory() -> None:
    memory = CacheMemory.of_bytes(2000, PAGE_BYTES, STATE_BYTES, mover=Contents())
    cache = make_cache(memory, CacheConfig(page_size=2, chunk_size=2, host=1000, enabled=False))
    assert cache.stats().host_bytes_total == 0


def test_memories_without_contents_are_refused() -> None:
    with pytest.raises(ArgumentError, match="this memory has no contents"):
        AuditedCache(CacheMemory.of_indices(8, 4), CacheConfig(page_size=2, chunk_size=2, host=1000))


@pytest.mark.parametrize("host", [0, -1, 1.5, True, "", "50%", "many", b"1"])
def test_host_memory_is_a_number_of_bytes(host: Any) -> None:
    with pytest.raises(ArgumentError, match="CacheConfig: host"):
        CacheConfig(host=host)


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"host=.* but only .* is free"):
        cache_on(host=1 << 60)


def test_amounts_are_read_as_those_of_memory() -> None:
    assert CacheConfig(host="2MiB").host == 2 * 2**20
