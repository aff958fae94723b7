"""The guard: it knows what LRU would have found, and has LRU take over where that is more."""

import logging
import math
from collections.abc import Iterator
from random import Random

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import Explanation
from hybrid.cache.placement import of_prompt
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree import guard
from hybrid.tree.node import Kind
from hybrid.tree.policies import LeastRecentlyUsed, MostRecentlyUsed
from hybrid.tree.policy import Facts, Policy

PAGE = 16


class Newest(Policy):
    """Evict the newest first, until it is told better."""

    guarded = True
    wrong = True

    def rank(self, facts: Facts) -> float:
        if not facts.is_live:
            return math.inf  # admits all
        return -facts.last_used if self.wrong else facts.last_used


class Watched(LeastRecentlyUsed):
    """LRU beside its own shadow."""

    guarded = True


def cache_of(policy: Policy | str) -> HybridCache:
    memory = CacheMemory.of_bytes(400_000, page_bytes=1000, state_bytes=8000)
    return HybridCache(memory, CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy))


def serve(cache: HybridCache, ids: list[int], num_input: int) -> Explanation:
    """Serve a request as an engine does."""
    key, names = Key.of(ids), cache.config.placement
    lease = cache.open(key, num_input - 1, num_input)
    assert lease is not None
    hit, spacing = lease.num_hit_tokens, cache.tree.anchor_spacing(num_input)
    given = {"branching_len": lease.branching_len, "shared": (), "declared": (), "is_replay": False}
    for position, kind in of_prompt(names, num_input, PAGE, hit=hit, spacing=spacing, **given).items():  # type: ignore[arg-type]
        if position > hit:
            cache.capture(lease, position, kind)
    cache.advance(lease, num_input)
    cache.commit(lease, key, num_input // PAGE * PAGE)
    if cache.reserve(lease, len(ids)):
        whole = len(ids) // PAGE * PAGE
        if whole > num_input:
            cache.capture(lease, whole, Kind.TURN_END)
        cache.advance(lease, len(ids))
        cache.commit(lease, key, whole)
    cache.close(lease)
    return lease.explanation


def chats(seed: int, requests: int) -> Iterator[tuple[list[int], int]]:
    """Conversations that go on soon, or are over."""
    random, open_chats = Random(seed), dict[int, list[int]]()
    system = [random.randrange(1000) for _ in range(5 * PAGE)]
    for number in range(requests):
        if len(open_chats) > 8:
            del open_chats[random.choice([*open_chats])]
        chat = random.choice([*open_chats, number])
        history = open_chats.get(chat, system) + [random.randrange(1000) for _ in range(random.randrange(20, 150))]
        answer = [random.randrange(1000) for _ in range(random.randrange(1, 60))]
        yield history + answer, len(history)
        open_chats[chat] = history + answer
        if len(history) > 1200:
            del open_chats[chat]


def test_the_shadow_finds_what_lru_finds() -> None:
    """Beside LRU itself, whose anchors, branches and evictions it has to follow without tokens."""
    cache = cache_of(Watched())
    asked = 0
    for ids, n in chats(0, 800):
        serve(cache, ids, n)
        asked += n
    cache.audit()
    beside = cache.tree.guard
    assert beside is not None and cache.stats().evicted_checkpoints > 500
    assert abs(beside.lru_hits - beside.hits) < 0.005 * asked
    assert 0.2 < beside.hits / asked < 0.95


def test_the_shadow_beside_another_policy_finds_about_what_lru_finds() -> None:
    lru, other = cache_of("lru"), cache_of("lhd")
    asked = hits = 0
    for ids, n in chats(1, 800):
        asked, hits = asked + n, hits + serve(lru, ids, n).usable_hit
        serve(other, ids, n)
    beside = other.tree.guard
    assert beside is not None
    assert abs(beside.lru_hits - hits) < 0.03 * asked


def test_lru_takes_over_from_a_policy_that_is_behind_and_gives_way_to_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "WINDOW", 64)
    monkeypatch.setattr(guard, "HOLD", 64)
    monkeypatch.setattr(guard, "BOUND", 0.03)  # the sample of a policy without an order is behind LRU itself by less
    caplog.set_level(logging.INFO, guard.log.name)
    policy = Newest()
    lru, alone, cache = cache_of("lru"), cache_of(MostRecentlyUsed()), cache_of(policy)
    hits = dict.fromkeys((lru, alone, cache), 0)
    asked, reasons = 0, set()
    for number, (ids, n) in enumerate(chats(2, 700)):
        policy.wrong = number < 200
        asked += n
        for one in hits:
            explanation = serve(one, ids, n)
            hits[one] += explanation.usable_hit
        if cache.stats().lru_is_on:
            reasons.add(explanation.reason.partition("; LRU")[2])
    stats = cache.stats()
    assert " decides now, which would have found more lately than the policy" in reasons
    assert not stats.lru_is_on and stats.lru_switches >= 2
    assert hits[alone] < 0.9 * hits[lru]  # it matters
    assert hits[cache] > hits[lru] - 0.05 * asked
    told = [record.getMessage() for record in caplog.records]
    assert "LRU takes over" in told[0] and "the policy is back" in told[1] and len(told) == stats.lru_switches


def test_a_policy_that_does_not_ask_for_it_has_no_guard() -> None:
    assert cache_of("lru").tree.guard is None and cache_of("lhd:guarded=0").tree.guard is None
    assert cache_of("lhd").tree.guard is not None


@pytest.mark.parametrize("seed", range(3))
def test_two_trees_with_the_same_requests_switch_at_the_same_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of several ranks must."""
    monkeypatch.setattr(guard, "WINDOW", 32)
    monkeypatch.setattr(guard, "HOLD", 16)
    first, second = cache_of(Newest()), cache_of(Newest())
    for ids, n in chats(seed, 200):
        assert serve(first, ids, n) == serve(second, ids, n)
        assert first.stats().lru_switches == second.stats().lru_switches
    assert first.stats().lru_switches > 0
