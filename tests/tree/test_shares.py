"""Shares of the memory: while a tenant has more than its own, it is evicted from before others."""

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.candidates import is_evictable_checkpoint, is_evictable_leaf, is_evictable_tail
from hybrid.tree.node import Node
from hybrid.tree.policy import Facts, Policy

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

PAGE = 4
PROMPT = 8 * PAGE


class Aging(Policy):
    """Recency, in samples."""

    def rank(self, facts: Facts) -> float:
        return -facts.age


def name_of(policy: Any) -> str:
    return policy if isinstance(policy, str) else type(policy).__name__


def one_budget() -> CacheMemory:
    return CacheMemory.of_bytes(40 * 12, 1, 4)  # 40 prompts of 8 pages with their states


def apart() -> CacheMemory:
    return CacheMemory.of_indices(40 * PROMPT // PAGE, 40)


def serve(cache: HybridCache, ids: list[int], tenant: str, num_common: int = 0) -> int:
    """A prompt of whole pages and its last question, in a namespace that all tenants share. Tokens that were there."""
    key = Key.of([*ids, 0])
    lease = cache.open(key, len(ids), len(ids) + 1, tenant=tenant)
    assert lease is not None
    for position in {num_common, len(ids)} - {0}:
        if position > lease.num_hit_tokens:
            cache.capture(lease, position)
    cache.advance(lease, len(ids) + 1)
    cache.commit(lease, key, len(ids))
    cache.close(lease)
    return lease.num_hit_tokens


@pytest.mark.parametrize("memory", [apart, one_budget])
@pytest.mark.parametrize("policy", ["lhd", "lru", "fifo", "flop_aware", "mru", "priority", Aging()], ids=name_of)
def test_a_share_protects_others_with_any_policy(policy: Any, memory: Callable[[], CacheMemory]) -> None:
    """One asks the same 20 prompts, for which half of the memory suffices; another sends two unique ones for each."""
    cache = HybridCache(memory(), CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy))
    cache.limit_tenants({"scan": 0.25})
    fresh, random, hits = count(100), Random(0), []
    for number in range(240):
        hits.append(serve(cache, [1 + random.randrange(20)] * PROMPT, "regular") == PROMPT)
        for _ in range(2 if number > 120 else 0):
            serve(cache, [next(fresh)] * PROMPT, "scan")
    assert all(hits[121:]) and cache.stats().evicted_checkpoints > 100
    cache.audit()


def test_memory_that_is_free_belongs_to_nobody() -> None:
    cache = HybridCache(apart(), CacheConfig(page_size=PAGE, chunk_size=PAGE))
    cache.limit_tenants({"alone": 0.1})
    for token in range(60):
        serve(cache, [token] * PROMPT, "alone")
    held, share = cache.stats().shares["alone"]
    assert held > 0.9 and share == 0.1
    cache.limit_tenants({})
    assert cache.stats().shares == {}
    cache.audit()


def test_what_tenants_share_stays_while_one_of_them_has_too_much() -> None:
    """The system prompt of both is there once: with it the answers of one do not suffer from the other's."""
    cache = HybridCache(apart(), CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction="lru"))
    cache.limit_tenants({"fast": 0.3})
    system, fresh = [7] * PROMPT, count(100)
    hits: dict[str, list[int]] = {"fast": [], "slow": []}
    for turn in range(60):
        for _ in range(4):
            hits["fast"].append(serve(cache, system + [next(fresh)] * PAGE, "fast", PROMPT))
        hits["slow"].append(serve(cache, system + [1 + turn % 9] * PAGE, "slow", PROMPT))
    assert {*hits["fast"][1:]} == {*hits["slow"][:9]} == {PROMPT}
    assert {*hits["slow"][9:]} == {PROMPT + PAGE}
    assert cache.stats().shares["fast"][0] <= 0.8
    cache.audit()


Evictable = Callable[[Node], bool]
KINDS: dict[str, tuple[Evictable, bool, bool]] = {
    "next_checkpoint": (is_evictable_checkpoint, False, True),
    "next_leaf": (lambda node: is_evictable_leaf(node) or is_evictable_tail(node), True, False),
    "next_of_all": (lambda node: is_evictable_checkpoint(node) or is_evictable_tail(node), True, True),
}
"""What each search may find, and whether pages and checkpoints are needed."""


@pytest.mark.parametrize("memory", [apart, one_budget])
@pytest.mark.parametrize("policy", ["lhd", "lru", Aging()], ids=name_of)
def test_each_victim_is_of_the_tenant_furthest_above_its_share_if_one_is(
    policy: Any, memory: Callable[[], CacheMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against a search through all nodes."""
    cache = HybridCache(memory(), CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy))
    cache.limit_tenants({"a": 0.2, "b": 0.3})
    candidates, random, from_above = cache.tree.candidates, Random(1), list[int]()

    def checked(name: str) -> Callable[[], Node | None]:
        search: Callable[[], Node | None] = getattr(candidates, name)
        may_go, pages, checkpoints = KINDS[name]

        def found() -> Node | None:
            owners = {node.owner for _, node in cache.tree.nodes() if may_go(node)}
            excesses = {owner: candidates.shares.excess(owner, pages, checkpoints) for owner in owners}
            victim = search()
            assert (victim is None) == (not owners)
            if victim is not None and max(excesses.values()) > 1:
                assert excesses[victim.owner] == max(excesses.values())
                from_above.append(victim.owner.number)
            return victim

        return found

    for name in KINDS:
        monkeypatch.setattr(candidates, name, checked(name))
    for _ in range(250):
        tenant, common = random.choice("aabc"), [random.randrange(3)] * PAGE * random.randrange(1, 5)
        serve(cache, common + [random.randrange(60)] * PAGE * random.randrange(1, 5), tenant, len(common))
        if random.random() < 0.1:
            cache.audit()
    assert len(from_above) > 30
