"""The value of a copy: learned from what left the device and was wanted again, whether it was copied or not."""

import pytest

from hybrid.cache.config import CacheConfig
from hybrid.cache.offloader import MAX_WATCHED, ReuseTracker
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.cost import Cost
from hybrid.tiers.value import HALVED_AFTER, Reuse
from hybrid.tree.node import Kind, NodeUsage
from support.caches import AuditedCache, Contents, compute, evict


def usage(kind: Kind = Kind.TURN_END, hits: int = 0) -> NodeUsage:
    return NodeUsage(1, 1, hits, kind)


def test_a_group_is_wanted_as_often_as_it_was() -> None:
    reuse = Reuse()
    tracker = ReuseTracker(reuse)
    assert reuse.probability("any") == 0.5
    for number in range(100):
        one = usage()
        tracker.count_evicted(one, "last")
        tracker.count_evicted(usage(), "inner")
        if number % 2:
            tracker.count_requested(one)
            tracker.count_requested(one)  # it is counted once
    assert abs(reuse.probability("last") - 0.5) < 0.01
    assert reuse.probability("inner") < 0.01


def test_groups_are_of_the_kind_what_continues_and_the_hits() -> None:
    group = ReuseTracker.group
    assert group(usage(), False) != group(usage(), True)
    assert group(usage(Kind.BRANCH), False) != group(usage(), False)
    assert group(usage(hits=1), False) != group(usage(hits=2), False)
    assert group(usage(hits=30), False) == group(usage(hits=40), False)


def test_what_was_long_ago_counts_less_and_is_forgotten() -> None:
    reuse = Reuse()
    tracker = ReuseTracker(reuse)
    first = usage()
    tracker.count_evicted(first, "first")
    for _ in range(MAX_WATCHED):
        tracker.count_evicted(usage(), "other")
    tracker.count_requested(first)
    assert reuse.probability("first") == 0.25, "it is not watched any more"
    for _ in range(HALVED_AFTER):
        one = usage()
        tracker.count_evicted(one, "other")
        tracker.count_requested(one)
    assert reuse.probability("other") > 0.5


def cache_on(host: int = 100_000) -> AuditedCache:
    memory = CacheMemory.of_bytes(20 * 64, 64, 128, mover=Contents())
    return AuditedCache(memory, CacheConfig(page_size=2, chunk_size=2, host=host))


def ask(cache: AuditedCache, key: Key) -> int:
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    hit = lease.num_hit_tokens
    cache.close(lease)
    return hit


def test_what_never_comes_back_is_not_written_after_a_while_and_what_does_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cost, "note", lambda *args: None)  # what this machine takes does not matter
    for comes_back in (False, True):
        cache = cache_on()
        cache.note_pass(1, 1e-7)  # computing takes twenty times as long as a copy
        for number in range(20):
            text = f"{number:02d}"
            key = compute(cache, "ab" + text)
            evict(cache)
            if comes_back:
                ask(cache, key)
        offered = cache.stats().host_bytes_written
        compute(cache, "abxy")
        evict(cache)
        assert (cache.stats().host_bytes_written > offered) == comes_back


def test_what_was_not_written_is_learned_of_too() -> None:
    cache = cache_on(host=1)  # nothing fits
    key = compute(cache, "abcd")
    node = cache.tree.peek(key, 8).checkpoint
    assert node is not None and cache.tiers is not None
    reuse, group = cache.tiers.savings.reuse, ReuseTracker.group(node.usage, False)
    evict(cache)
    assert cache.stats().host_checkpoints == 0
    assert reuse.probability(group) == 0.25
    assert ask(cache, key) == 0
    assert reuse.probability(group) == 0.75
