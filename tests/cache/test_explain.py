"""Why a hit was what it was: each reason, reached by a real situation. Pages hold two tokens, the grid is four."""

import pytest

from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import DisabledCache
from hybrid.memory.memory import CacheMemory
from support.caches import AuditedCache, audited_cache, key_of, prefill, serve, start


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=32, num_states=8, page_size=2, chunk_size=4)


def reason(cache: AuditedCache, text: str, namespace: str = "", extra: int = 0) -> str:
    """The reason that a request is given. It goes as it came: nothing of it is kept."""
    lease = start(cache, key_of(cache, text, namespace, extra))
    cache.close(lease)
    explanation = lease.explanation
    assert explanation.asked == 2 * len(text) + extra
    assert explanation.usable_hit == lease.num_hit_tokens <= explanation.page_hit
    return explanation.reason


def test_the_cache_is_empty(cache: AuditedCache) -> None:
    assert reason(cache, "ab") == "the cache is empty"


def test_nothing_is_kept_in_a_namespace(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    assert reason(cache, "abcd", "tenant") == "nothing is cached in this namespace"
    assert reason(cache, "abcd", extra=1).startswith("all up to")


def test_the_default_namespace_may_be_empty_where_the_cache_is_not(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd", "tenant"))
    assert reason(cache, "abcd") == "nothing is cached in this namespace"


def test_first_sight_of_a_prompt(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    assert reason(cache, "xyz") == "this prompt is new"


def test_first_sight_of_what_follows(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    assert reason(cache, "abcdxyz") == "the tokens after 8 are new"


def test_first_sight_of_what_follows_pages_that_reach_no_checkpoint(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    assert reason(cache, "axyz") == "the tokens after 2 are new"


def test_pages_but_no_checkpoint(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcdef"))
    assert reason(cache, "abcdxyz") == "no checkpoint between 0 and 8; one is captured at 8"
    assert reason(cache, "abxyz") == "no checkpoint between 0 and 4; one is captured at 4"


def test_the_checkpoint_was_evicted(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    cache.evict_checkpoints(1)
    assert reason(cache, "abcdxyz") == "the checkpoint between 0 and 8 was evicted; one is captured at 8"


def test_what_follows_was_evicted(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    serve(cache, key_of(cache, "abcdefgh"))
    cache.evict_pages(2)
    assert reason(cache, "abcdefgh") == "no checkpoint between 8 and 12; one is captured at 12"
    cache.evict_pages(2)
    assert reason(cache, "abcdefgh") == "the tokens after 8 were evicted"
    assert reason(cache, "abcdxyz") == "the tokens after 8 are new"


def test_one_token_is_left_to_compute(cache: AuditedCache) -> None:
    key = key_of(cache, "abcd")
    lease = start(cache, key)
    for position in (4, 8):
        cache.capture(lease, position)
    cache.advance(lease, 8)
    cache.commit(lease, key, 8)
    cache.close(lease)
    assert reason(cache, "abcd") == "capped at 4, the last multiple of 4 that leaves a token to compute"


def test_all_of_it(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    assert reason(cache, "abcd", extra=1) == "all up to the last multiple of 4"
    serve(cache, key_of(cache, "abcde"))
    assert reason(cache, "abcde", extra=1) == "all up to the last multiple of 4"


def test_a_prompt_shorter_than_the_grid_has_nothing_to_share(cache: AuditedCache) -> None:
    short = "a hit ends at a multiple of 4, and the prompt is shorter"
    assert reason(cache, "a", extra=1) == short  # and not "the cache is empty": it stays so
    serve(cache, key_of(cache, "abcd"))
    assert reason(cache, "", extra=1) == reason(cache, "a") == short


def test_the_cache_is_off() -> None:
    cache = DisabledCache(CacheMemory.of_indices(8, 4), CacheConfig(page_size=2, chunk_size=2))
    lease = prefill(cache, key_of(cache, "abc"))
    assert str(lease.explanation) == "0 of 6 tokens cached, pages up to 0: the cache is disabled"


def test_an_explanation_reads_as_a_sentence(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcdef"))
    lease = start(cache, key_of(cache, "abcdefgh"))
    assert str(lease.explanation) == "12 of 16 tokens cached, pages up to 12: the tokens after 12 are new"
