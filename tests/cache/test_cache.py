"""The cache as a whole: its kinds, its size, its statistics."""

import re
from dataclasses import asdict

import pytest
import torch

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import DisabledCache, make_cache
from hybrid.cache.lease import Lease
from hybrid.cache.stats import CacheStats
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.memory.memory import MIN_STATE_SLOTS, CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.spec import HybridSpec, StateTensor, TokenTensor
from support.caches import AuditedCache, audited_cache, key_of, prefill, release, serve, start

CPU = torch.device("cpu")


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=16, num_states=8)


# Indices and no tensors


def test_a_disabled_cache_manages_memory_and_keeps_nothing() -> None:
    cache = make_cache(CacheMemory.of_indices(8, 4), CacheConfig(enabled=False, page_size=2, chunk_size=2))
    assert isinstance(cache, DisabledCache)
    key = key_of(cache, "abc")
    for _ in range(3):
        lease = prefill(cache, key)
        assert (lease.num_hit_tokens, lease.num_shared, lease.captured) == (0, 0, [])
        assert (cache.capture(lease, 2), cache.capture_spare(lease, 2), cache.take_back(lease)) == (None, None, False)
        cache.donate_states(lease, 6)
        cache.commit(lease, key, 6)
        assert lease.explanation.reason == "the cache is disabled"
        cache.audit()
        cache.close(lease)
        cache.audit()
        assert (cache.stats().pages_free, cache.stats().states_free) == (8, 4)
    assert cache.stats().hit_rate == 0


def test_a_cache_of_indices_numbers_pages_from_zero_and_slots_from_one() -> None:
    cache = HybridCache(CacheMemory.of_indices(3, 2))
    assert set(cache.memory.pages.free_indices()) == {0, 1, 2}
    assert set(cache.memory.states.free_indices()) == {1, 2}
    assert (cache.stats().pages_total, cache.stats().states_total) == (3, 2)
    assert (cache.stats().page_bytes, cache.stats().checkpoint_bytes) == (0, 0)
    assert cache.config == CacheConfig()


def test_an_unknown_eviction_policy_is_refused() -> None:
    with pytest.raises(ArgumentError, match="most recently bought"):
        HybridCache(CacheMemory.of_indices(3, 2), CacheConfig(eviction="most recently bought"))


def test_statistics_count_requests_and_add_up(cache: AuditedCache) -> None:
    def private(leases: set[Lease]) -> tuple[int, int]:
        pages = sum((len(lease.block_table) - lease.num_shared for lease in leases), 0)
        return pages, sum(len(lease.private_slots()) for lease in leases)

    assert cache.stats().hit_rate == 0
    serve(cache, key_of(cache, "abcd"))  # 0 of 8
    serve(cache, key_of(cache, "abcde"))  # 8 of 10
    running = start(cache, key_of(cache, "abcx"))  # pages of 6, of 8
    cache.capture(running, 6)
    stats = cache.stats()
    assert (stats.requests, stats.prompt_tokens, stats.usable_tokens, stats.page_tokens) == (3, 26, 8, 14)
    assert stats.hit_rate == 8 / 26
    assert stats.pages_total == stats.pages_free + stats.pages_cached + stats.pages_private == 16
    assert stats.states_total == stats.states_free + stats.checkpoints + stats.states_private == 8
    assert (stats.pages_private, stats.states_private) == private(cache.leases) == (1, 2)
    assert stats.evicted_pages == stats.evicted_checkpoints == 0


def test_statistics_begin_at_zero() -> None:
    assert not any(asdict(CacheStats()).values())


def test_statistics_are_a_copy(cache: AuditedCache) -> None:
    cache.stats().requests = 99
    assert cache.stats().requests == 0


def test_statistics_count_what_was_evicted_to_make_room(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "a" * 16))
    serve(cache, key_of(cache, "b" * 4))
    assert (cache.stats().evicted_pages, cache.stats().evicted_checkpoints) == (4, 1)


def test_clear_spares_what_running_requests_need(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    serve(cache, key_of(cache, "xyz"))
    lease = start(cache, key_of(cache, "abcde"))
    cache.clear()
    assert cache.tree.peek(key_of(cache, "abcd"), 8)[:2] == (8, 8)
    assert cache.tree.peek(key_of(cache, "xyz"), 6).num_page_tokens == 0
    cache.advance(lease, 10)
    cache.commit(lease, key_of(cache, "abcde"), 10)
    cache.close(lease)
    release(cache)


# Tensors

SPEC = HybridSpec(
    tokens=(TokenTensor.kv(2, 1, 4, torch.bfloat16),),
    state=(StateTensor("conv", (3, 5), torch.bfloat16), StateTensor("recurrent", (3, 2, 4), torch.float32)),
)
PAGE_BYTES = 2 * 2 * 8 * 4 * 2
STATE_BYTES = 64 + 128  # 30 and 96 bytes, each from a multiple of 64


def sized(memory: int | float | str, free: int = 10**6, state_share: float = 0.5) -> HybridCache:
    return of_spec(SPEC, CacheConfig(page_size=8, chunk_size=8, memory=memory, state_share=state_share), free)


def of_spec(spec: HybridSpec, config: CacheConfig, free: int) -> HybridCache:
    num_bytes = config.memory_bytes(free)
    memory = CacheMemory.for_spec(spec, num_bytes, CPU, page_size=config.page_size, state_share=config.state_share)
    return HybridCache(memory, config)


def test_the_memory_is_shared_between_states_and_pages_and_never_exceeded() -> None:
    cache = sized(10_000, state_share=0.25)
    assert cache.memory.states.size == 2500 // STATE_BYTES == 13
    assert cache.memory.pages.size == (10_000 - 13 * STATE_BYTES) // PAGE_BYTES == 29
    num_bytes = cache.kv.numel() * 2 + cache.state_tensors["conv"].stride(0) * 2 * cache.memory.states.size
    assert 10_000 - PAGE_BYTES < num_bytes <= 10_000
    assert (cache.stats().page_bytes, cache.stats().checkpoint_bytes) == (PAGE_BYTES, STATE_BYTES)
    cache.audit()


def test_memory_may_be_a_part_of_what_is_free() -> None:
    assert sized(0.5, free=20_000).stats() == sized(10_000).stats() == sized("10000").stats()


def test_the_empty_state_is_zeros_and_is_never_handed_out() -> None:
    cache = sized(10_000)
    assert all(not tensor[EMPTY_STATE].any() for tensor in cache.state_tensors.values())
    assert cache.state_tensors["conv"].shape == (cache.memory.states.size, 3, 5)
    assert cache.state_tensors["recurrent"].dtype == torch.float32
    assert EMPTY_STATE not in cache.memory.states.free_indices()


def test_slots_and_pages_do_not_overlap() -> None:
    cache = sized(5_000)
    for pool in (*cache.state_tensors.values(), cache.kv):
        pool.copy_(torch.arange(len(pool)).view(-1, *[1] * (pool.dim() - 1)).expand_as(pool))
    for pool in (*cache.state_tensors.values(), cache.kv):
        assert all((pool[index] == index).all() for index in range(len(pool)))


def named_amount(error: MemoryBudgetError) -> int:
    """The smallest memory that suffices, as the error says."""
    named = re.search(r"needs at least .*: CacheConfig\(memory=([0-9]+)\)", str(error))
    assert named is not None
    return int(named[1])


@pytest.mark.parametrize("state_share", [0.1, 0.5, 0.9])
def test_too_little_memory_is_refused_and_the_error_names_an_amount_that_suffices(state_share: float) -> None:
    refused = []
    for memory in range(1, 8_000, 37):
        try:
            cache = sized(memory, state_share=state_share)
        except MemoryBudgetError as error:
            refused.append((memory, named_amount(error)))
        else:
            assert cache.memory.states.size >= MIN_STATE_SLOTS
            assert cache.memory.pages.size >= 1
    assert refused
    for memory, named in refused:
        assert named > memory
        sized(named, state_share=state_share)


def test_the_amount_named_suffices_where_states_are_large_and_pages_small() -> None:
    for num_bytes in range(1_000_000, 1_400_000, 31_000):
        state = StateTensor("recurrent", (1, num_bytes), torch.uint8)
        spec = HybridSpec((TokenTensor.kv(1, 1, 1024, torch.float16),), (state,))
        with pytest.raises(MemoryBudgetError) as refused:
            of_spec(spec, CacheConfig(page_size=4, memory=1000, state_share=0.5), free=10**9)
        enough = CacheConfig(page_size=4, memory=named_amount(refused.value), state_share=0.5)
        of_spec(spec, enough, free=10**9).audit()


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"memory=.1MiB. is 1.0 MiB, but only 9.8 KiB is free"):
        sized("1MiB", free=10_000)


def test_what_the_memory_holds_is_counted_in_bytes_by_kind() -> None:
    stats = CacheStats(
        page_bytes=7, checkpoint_bytes=100, pages_cached=3, checkpoints=2, pages_private=4, states_private=1
    )
    assert [(name, num_bytes) for name, num_bytes, _ in stats.kinds] == [
        ("pages cached", 21),
        ("checkpoints", 200),
        ("in use by requests", 128),
    ]
