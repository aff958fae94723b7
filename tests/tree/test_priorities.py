"""Priorities weigh among what one tenant sends; how far they reach across to others is the operator's to say."""

import gc
from array import array
from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint, Kind
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import Facts, Policy
from hybrid.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

PAGE = 4
PROMPT = 8 * PAGE


def make(policy: str = "lhd", priority_cap: int = 0) -> HybridCache:
    config = CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy, priority_cap=priority_cap)
    return HybridCache(CacheMemory.of_indices(40 * PROMPT // PAGE, 40), config)


def serve(cache: HybridCache, token: int, namespace: str, priority: int, tenant: str | None = None) -> bool:
    """A prompt of one token and its last question. Whether the prompt was there."""
    key = Key.of([token] * PROMPT + [0], namespace)
    lease = cache.open(key, PROMPT, PROMPT + 1, priority, tenant)
    assert lease is not None
    hit = lease.num_hit_tokens == PROMPT
    if not hit:
        cache.capture(lease, PROMPT)
    cache.advance(lease, PROMPT + 1)
    cache.commit(lease, key, PROMPT)
    cache.close(lease)
    return hit


def hit_rate(
    cache: HybridCache,
    scan_priority: Callable[[], int],
    priority_of: Callable[[int], int] = lambda token: 0,
    namespaces: tuple[str, str] = ("regular", "scan"),
    tenants: tuple[str | None, str | None] = (None, None),
) -> float:
    """Return the hit rate of a client that asks the same 20 prompts over and over, while another sends two unique ones
    for each of its."""
    fresh, random, hits = count(100), Random(0), []
    for number in range(1200):
        token = 1 + random.randrange(20)
        hits.append(serve(cache, token, namespaces[0], priority_of(token), tenants[0]))
        for _ in range(2 if number > 200 else 0):
            serve(cache, next(fresh), namespaces[1], scan_priority(), tenants[1])
    return sum(hits[600:]) / len(hits[600:])


def test_unique_prompts_leave_the_hits_of_others_alone() -> None:
    assert hit_rate(make(), lambda: 0) >= 0.99
    assert hit_rate(make("lru"), lambda: 0) < 0.5


def test_the_highest_priority_of_one_client_leaves_the_hits_of_another_namespace_alone() -> None:
    assert hit_rate(make(), lambda: 100) >= 0.99


@pytest.mark.parametrize(
    ("policy", "hits"), [("lfu", 1.0), ("filo", 1.0), ("lru", 0.49), ("flop_aware", 0.49), ("fifo", 0.41), ("mru", 0.0)]
)
def test_priorities_of_another_change_nothing_and_what_is_left_follows_from_the_policy(
    policy: str, hits: float
) -> None:
    """The table of docs/eviction.md."""
    without, with_them = (hit_rate(make(policy), lambda: priority) for priority in (0, 100))  # noqa: B023
    assert without == with_them == pytest.approx(hits, abs=0.01)


def test_one_high_priority_among_low_ones_does_not_either() -> None:
    random = Random(1)
    assert hit_rate(make(), lambda: random.choice((0, 0, 0, 100))) >= 0.99


def test_an_operator_may_let_priorities_reach_across() -> None:
    assert hit_rate(make(priority_cap=100), lambda: 100) < 0.5


def test_a_priority_weighs_against_requests_of_its_own_namespace() -> None:
    """Two sets of prompts of one namespace do not both fit: those of higher priority stay."""
    cache, random = make(), Random(0)
    hits: dict[int, list[bool]] = {0: [], 5: []}
    for _ in range(1500):
        priority = random.choice((0, 5))
        token = 1 + random.randrange(30) + 100 * priority
        hits[priority].append(serve(cache, token, "", priority))
    low, high = (sum(hits[priority][300:]) / len(hits[priority][300:]) for priority in (0, 5))
    assert high > 0.95 > low + 0.2


def test_what_a_sender_prefers_among_its_own_does_not_devalue_the_rest() -> None:
    """One of a sender's prompts has a high priority, and another sends unique ones: the other 19 stay too."""
    assert hit_rate(make(), lambda: 0, priority_of=lambda token: 50 * (token == 1)) >= 0.99


def test_senders_of_one_namespace_are_told_apart_by_their_names() -> None:
    """The most important of unique prompts leave the hits of another sender alone."""
    assert hit_rate(make(), lambda: 100, namespaces=("", "")) < 0.5
    assert hit_rate(make(), lambda: 100, namespaces=("", ""), tenants=(None, "scan")) >= 0.99


class ByPriority(Policy):
    """Recency and priority, in samples."""

    def rank(self, facts: Facts) -> float:
        return facts.priority_weight * 2.0**-facts.age


def test_a_policy_of_the_user_compares_tenants_without_their_priorities() -> None:
    """Of two senders the one that sends most loses by recency, whatever priorities it gives."""
    cache = HybridCache(
        CacheMemory.of_indices(80, 10), CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=ByPriority())
    )
    for token in range(6):
        serve(cache, token, "first", 9 if token < 3 else 0)
    for token in range(100, 105):
        serve(cache, token, "second", 100)  # evicts the least important of the first, oldest first
    assert [serve(cache, token, "first", 0) for token in range(4)] == [True, True, True, False]


def test_what_another_tenant_gave_ends_when_one_stores_the_checkpoint_again() -> None:
    tree = Tree(PAGE, PAGE, LeastRecentlyUsed())
    key = Key.of([1] * PAGE)

    def store(slot: int, priority: int, tenant: str | None) -> int:
        made = Checkpoint(slot, PAGE, Kind.BRANCH, priority, tenant=tenant)
        return tree.insert(key, PAGE, array("i", [0]), made).node.usage.priority

    assert store(0, 3, "one") == 3
    assert store(1, 9, "other") == 3, "it is not the other's"
    assert store(2, 5, "one") == 5
    tree.evict_checkpoints(1)
    assert store(3, -2, "other") == -2


def test_tenants_of_which_nothing_is_known_are_forgotten() -> None:
    tree = Tree(PAGE, PAGE, LeastRecentlyUsed(), max_ghosts=50)
    for number in range(1000):
        made = Checkpoint(0, PAGE, Kind.BRANCH, number % 3, tenant=str(number))
        tree.insert(Key.of([number] * PAGE), PAGE, array("i", [0]), made)
        tree.evict_all()
    gc.collect()
    assert len(tree.tenants) <= 100, "ghosts remember some"


@pytest.mark.parametrize("wrong", [-1, 101, 0.5, True, "3"])
def test_a_cap_is_a_number_of_steps(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="priority_cap"):
        CacheConfig(priority_cap=wrong)  # type: ignore[arg-type]
