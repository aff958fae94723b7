"""A policy that breaks its word is dismissed: a warning says why, LRU takes over, and nothing is lost."""

import functools
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from hybrid.cache.config import CacheConfig
from hybrid.memory.arena import PieceLayout
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import AgingPolicy, Facts, Policy, PolicyWarning
from support.caches import AuditedCache, key_of, release, serve, start

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

TEXTS = ("ab", "abc", "de", "abf", "ghij", "ab", "abf", "klm")


class Broken(Policy):
    """Ranks by something of no meaning, until the call of number `at` of the method named."""

    def __init__(self, method: str, at: int, act: Callable[[], object]) -> None:
        self.method, self.at, self.act = method, at, act
        self.num_calls = 0

    def call(self, method: str) -> object:
        if method != self.method:
            return None
        self.num_calls += 1
        return self.act() if self.num_calls - 1 == self.at else None

    def rank(self, facts: Facts) -> object:
        rank = self.call("rank")
        return facts.created * 7919 % 1009 if rank is None else rank

    def hit(self, *_: object) -> None:
        self.call("hit")

    def evicted(self, *_: object) -> None:
        self.call("evicted")

    def missed(self, *_: object) -> None:
        self.call("missed")


class BrokenInOrder(Broken):
    """The same, kept in order."""

    order = "any"


def boom() -> object:
    raise ValueError("planted")


RETURNED = {"nothing": list[int], "a text": lambda: "0.5", "NaN": lambda: float("nan"), "a complex": lambda: 1j}
"""What is no rank: an empty list stands for None, which means in `Broken` that nothing is planted."""


def cache_with(policy: object, *, elastic: bool = False) -> AuditedCache:
    config = CacheConfig(page_size=2, chunk_size=2, eviction=policy)  # type: ignore[arg-type]
    if elastic:
        layout = PieceLayout.of(64, 256)
        return AuditedCache(CacheMemory.of_bytes(6 * layout.num_bytes, 64, 256), config)
    return AuditedCache(CacheMemory.of_indices(7, 4), config)


def work(cache: AuditedCache) -> None:
    """Requests that share, hit, evict, and miss what has gone; beside one that holds memory."""
    lease = start(cache, key_of(cache, "q"))
    for text in TEXTS:
        serve(cache, key_of(cache, text))
    cache.clear()
    for text in TEXTS[:4]:
        serve(cache, key_of(cache, text))
    cache.close(lease)


def count_calls(method: str, kind: type[Broken], elastic: bool = False) -> int:
    policy = kind(method, -1, boom)
    cache = cache_with(policy, elastic=elastic)
    work(cache)
    stats = cache.stats()
    assert stats.policy_failure is None
    assert stats.evicted_pages + stats.evicted_checkpoints > 5
    return policy.num_calls


def assert_lru(cache: AuditedCache) -> None:
    """From now on the least recently used goes."""
    cache.evict_checkpoints(1)
    while cache.tree.num_checkpoints:
        node = min((node for _, node in cache.tree.nodes() if node.slot is not None), key=lambda n: n.usage.last_used)
        slot = node.slot
        assert slot is not None
        cache.evict_checkpoints(1)
        assert cache.victims[-1] == ([], [slot])
    while cache.tree.num_pages:
        leaves = [node for _, node in cache.tree.nodes() if not node.children]
        last_used = {node.pages[-1]: node.usage.last_used for node in leaves}
        cache.evict_pages(1)
        assert last_used[cache.victims[-1][0][0]] == min(last_used.values())


def check_dismissal(policy: Broken, reason: str, elastic: bool) -> None:
    cache = cache_with(policy, elastic=elastic)
    with pytest.warns(PolicyWarning) as warned:
        work(cache)
    text = str(warned[0].message)
    assert len(warned) == 1
    assert text.startswith(f"eviction policy {type(policy).__name__}: ")
    assert text.endswith("; LRU takes over")
    assert reason in text
    assert cache.stats().policy_failure == text
    stats = cache.stats()
    assert (stats.pages_private, stats.states_private) == (0, 0)
    assert_lru(cache)
    release(cache)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("kind", [Broken, BrokenInOrder])
@pytest.mark.parametrize("method", ["rank", "hit", "evicted", "missed"])
def test_a_policy_that_raises_is_dismissed_whichever_call_it_is(method: str, kind: type[Broken], elastic: bool) -> None:
    num_calls = count_calls(method, kind, elastic)
    assert num_calls > 0
    for at in range(0, num_calls, 4 if elastic else 1):
        check_dismissal(kind(method, at, boom), f"{method} raised ValueError('planted')", elastic)


@pytest.mark.parametrize("kind", [Broken, BrokenInOrder])
@pytest.mark.parametrize("returned", RETURNED)
def test_a_rank_that_is_no_number_is_refused_whichever_call_it_is(returned: str, kind: type[Broken]) -> None:
    for at in range(0, count_calls("rank", kind), 7):
        check_dismissal(kind("rank", at, RETURNED[returned]), "rank", elastic=False)


def test_a_rank_of_none_is_refused() -> None:
    class Silent(Policy):
        def rank(self, facts: Facts) -> None:
            return None

    cache = cache_with(Silent())
    with pytest.warns(PolicyWarning, match="Silent: rank .*; LRU takes over"):
        work(cache)
    assert_lru(cache)


def test_ranks_may_be_infinite_integers_and_booleans() -> None:
    class Wide(Policy):
        def rank(self, facts: Facts) -> float:
            return (float("inf"), -float("inf"), 3, True)[facts.created % 4]

    cache = cache_with(Wide())
    work(cache)
    assert cache.stats().policy_failure is None


def test_an_unforeseen_interrupt_is_not_taken_for_a_fault_of_the_policy() -> None:
    def interrupt() -> object:
        raise KeyboardInterrupt

    cache = cache_with(Broken("rank", 0, interrupt))
    for text in ("ab", "cd"):
        serve(cache, key_of(cache, text))
    with pytest.raises(KeyboardInterrupt):
        cache.evict_checkpoints(1)
    assert cache.stats().policy_failure is None


def test_a_dismissed_policy_is_asked_nothing_any_more() -> None:
    policy = Broken("rank", 0, boom)
    cache = cache_with(policy)
    with pytest.warns(PolicyWarning):
        work(cache)
    work(cache)
    assert policy.num_calls == 1


def test_a_policy_derived_from_ours_is_dismissed_too() -> None:
    class Mine(LeastRecentlyUsed):
        num_calls = 0

        def rank(self, facts: Facts) -> float:
            self.num_calls += 1
            if self.num_calls == 10:
                raise ValueError("planted")
            return 1e9 - facts.last_used

    cache = cache_with(Mine())
    with pytest.warns(PolicyWarning, match="Mine: rank raised"):
        work(cache)
    assert_lru(cache)


class Recency(Policy):
    """The least a policy has."""

    def rank(self, facts: Facts) -> float:
        return facts.last_used


@pytest.mark.parametrize("name", ["hit", "evicted", "missed"])
def test_a_hook_without_a_name_of_its_own_is_dismissed_as_any_other(name: str) -> None:
    policy = Recency()
    setattr(policy, name, functools.partial(lambda *_: boom()))
    cache = cache_with(policy)
    with pytest.warns(PolicyWarning, match="planted.*; LRU takes over"):
        work(cache)
    assert_lru(cache)
    release(cache)


@pytest.mark.parametrize("name", ["hit", "evicted", "missed"])
def test_a_users_attribute_that_has_the_name_of_a_hook_loses_nothing(name: str) -> None:
    policy = Recency()
    setattr(policy, name, 0)  # a counter, say
    cache = cache_with(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work(cache)
    release(cache)


@pytest.mark.parametrize("method", ["rank", "hit", "evicted", "missed"])
def test_nothing_is_lost_where_warnings_are_errors(method: str) -> None:
    """`python -W error`: the dismissal itself raises, wherever it happens."""
    for at in range(count_calls(method, Broken)):
        cache = cache_with(Broken(method, at, boom))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in TEXTS * 2:
                try:
                    serve(cache, key_of(cache, text))
                except PolicyWarning:
                    for lease in list(cache.leases):
                        cache.close(lease)
        assert cache.leases == set()
        release(cache)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("method", ["weigh", "ranks"])
@pytest.mark.parametrize(
    "returned", [boom, lambda: None, lambda: "0.5", lambda: np.full(3, math.nan), lambda: (0, math.nan)]
)
def test_one_that_ranks_samples_is_dismissed_too(method: str, returned: Callable[[], object], elastic: bool) -> None:
    class Aging(AgingPolicy):
        num_calls = 0

        def call(self, name: str, result: object) -> object:
            self.num_calls += name == method
            return returned() if name == method and self.num_calls == 3 else result

        def weigh(self, facts: Facts) -> object:
            return self.call("weigh", (0, facts.created * 7919.0 % 1009))

        def ranks(self, groups: object, weights: np.ndarray, ages: object) -> object:
            return self.call("ranks", weights)

    cache = cache_with(Aging(), elastic=elastic)
    with pytest.warns(PolicyWarning, match="LRU takes over"):
        work(cache)
    assert "Aging" in (cache.stats().policy_failure or "")
    release(cache)
