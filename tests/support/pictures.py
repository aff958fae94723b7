"""Small caches to be drawn: a token per character, pages of two."""

from typing import Any

from hybrid import CacheConfig, CacheMemory, HybridCache, Key
from hybrid.cache.snapshot import take_snapshot
from support.caches import AuditedCache, Contents


def cache_with(*texts: str, namespace: str = "") -> HybridCache:
    """A cache in pages of 2 that served these texts, a token per character."""
    cache = HybridCache(CacheMemory.of_indices(200, 50), CacheConfig(page_size=2, chunk_size=2))
    for text in texts:
        serve(cache, text, namespace)
    return cache


def serve(cache: HybridCache, text: str, namespace: str = "") -> None:
    key = Key.of([*map(ord, text)], namespace)
    lease = cache.open_whole(key)
    assert lease is not None
    whole = len(text) // 2 * 2
    assert cache.reserve(lease, whole)
    if lease.num_hit_tokens < whole:
        cache.capture(lease, whole)
        cache.advance(lease, whole)
        cache.commit(lease, key, whole)
    cache.close(lease)


def tiered_cache() -> AuditedCache:
    """A cache in pages of 2 with host memory, to which two of its four checkpoints have gone, and a whole branch."""
    memory = CacheMemory.of_bytes(100 * 64, 64, 128, mover=Contents())
    cache = AuditedCache(memory, CacheConfig(host=100_000, page_size=2, chunk_size=2, eviction="lru"))
    for text in ("mnopqr", "abcd", "abcdefgh", "abcdxxyy", "abcdefghij"):
        serve(cache, text)
    cache.evict_pages(3)
    serve(cache, "abcdxxyy")
    cache.evict_checkpoints(2)
    return cache


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def snapshot_of(cache: HybridCache) -> dict[str, Any]:
    return take_snapshot(cache.tree, cache.stats(), cache.tiers)
