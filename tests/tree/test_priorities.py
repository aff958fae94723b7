"""Priorities weigh within a namespace; how far they reach across to others is the operator's to say."""

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
from hybrid.tree.policy import Facts
from hybrid.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

PAGE = 4
PROMPT = 8 * PAGE


def make(policy: str = "lhd", priority_cap: int = 0) -> HybridCache:
    config = CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy, priority_cap=priority_cap)
    return HybridCache(CacheMemory.of_indices(40 * PROMPT // PAGE, 40), config)


def serve(cache: HybridCache, token: int, namespace: str, priority: int) -> bool:
    """A prompt of one token and its last question. Whether the prompt was there."""
    key = Key.of([token] * PROMPT + [0], namespace)
    lease = cache.open(key, PROMPT, PROMPT + 1, priority)
    assert lease is not None
    hit = lease.num_hit_tokens == PROMPT
    if not hit:
        cache.capture(lease, PROMPT)
    cache.advance(lease, PROMPT + 1)
    cache.commit(lease, key, PROMPT)
    cache.close(lease)
    return hit


def hit_rate(cache: HybridCache, scan_priority: Callable[[], int], others_priority: int = 0) -> float:
    """Return the hit rate of a client that asks the same 20 prompts over and over, while another sends two unique ones
    for each of its."""
    fresh, random, hits = count(100), Random(0), []
    for number in range(1200):
        hits.append(serve(cache, 1 + random.randrange(20), "regular", others_priority))
        for _ in range(2 if number > 200 else 0):
            serve(cache, next(fresh), "scan", scan_priority())
    return sum(hits[600:]) / len(hits[600:])


def test_unique_prompts_leave_the_hits_of_others_alone() -> None:
    assert hit_rate(make(), lambda: 0) >= 0.99
    assert hit_rate(make("lru"), lambda: 0) < 0.5


def test_the_highest_priority_of_one_client_leaves_the_hits_of_another_namespace_alone() -> None:
    assert hit_rate(make(), lambda: 100) >= 0.99


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


@pytest.mark.parametrize(("cap", "low", "high"), [(0, -9, 0), (4, -5, 4), (20, 0, 9)])
def test_a_checkpoint_that_is_not_stored_yet_weighs_as_those_of_its_namespace(cap: int, low: int, high: int) -> None:
    tree = Tree(PAGE, PAGE, LeastRecentlyUsed(), priority_cap=cap)
    tree.insert(Key.of([1] * PAGE, "own"), PAGE, array("i", [0]), Checkpoint(0, PAGE, Kind.BRANCH, 9))
    for namespace, priority, steps in (("own", 0, low), ("own", 9, high), ("other", 0, 0)):
        usage = tree.new_usage(Kind.BRANCH, 0, namespace)
        if priority:
            usage.raise_priority(priority)
        assert Facts.without_node(usage, 0, 2 * PAGE).priority_weight == 2.0**steps


def test_a_checkpoint_that_was_not_admitted_to_a_namespace_that_was_empty_counts_as_one_of_it() -> None:
    tree = Tree(PAGE, PAGE, LeastRecentlyUsed())
    usage = tree.new_usage(Kind.BRANCH, 0, "own")
    usage.raise_priority(3)
    tree.insert(Key.of([1] * PAGE, "own"), PAGE, array("i", [0]), past=usage)
    assert Facts.without_node(tree.new_usage(Kind.BRANCH, 0, "own"), 0, PAGE).priority_weight == 2.0**-3


@pytest.mark.parametrize("wrong", [-1, 101, 0.5, True, "3"])
def test_a_cap_is_a_number_of_steps(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="priority_cap"):
        CacheConfig(priority_cap=wrong)  # type: ignore[arg-type]
