"""One thread owns a cache. Calls that change something raise in any other, and `stats` may be asked from everywhere."""

import os
import sys
import threading
from collections.abc import Callable
from random import Random

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pin
from hybrid.cache.stats import CacheStats
from hybrid.errors import OwnershipError
from hybrid.memory.memory import CacheMemory
from support.caches import audited_cache, key_of, release, serve, start
from support.threads import in_a_thread


class Owned:
    """A cache that this thread owns: a prefix that is pinned, and a request under way with a pair of states."""

    def __init__(self) -> None:
        self.cache: HybridCache = audited_cache(num_pages=16, num_states=8)
        serve(self.cache, key_of(self.cache, "ab"))
        serve(self.cache, key_of(self.cache, "abcd"))
        pin = self.cache.pin(key_of(self.cache, "ab"))
        assert pin is not None
        self.pin: Pin = pin
        self.key = key_of(self.cache, "abxyz")
        self.lease: Lease = start(self.cache, self.key)
        assert self.cache.take_back(self.lease)
        assert self.cache.capture(self.lease, 10)

    def books(self) -> tuple[object, ...]:
        lease, pin = self.lease, self.pin
        held = [getattr(lease, name) for name in ("front", "back", "read_slot", "front_tokens", "back_tokens")]
        locks = [(node.end, node.slot, node.page_locks, node.state_locks) for _, node in self.cache.tree.nodes()]
        usage = [(node.usage.last_used, node.usage.hits) for _, node in self.cache.tree.nodes()]
        return (
            self.cache.stats(),
            held,
            list(lease.block_table),
            list(lease.captured),
            lease.state_lock,
            lease.page_lock,
            (pin.num_tokens, pin.expires),
            locks,
            usage,
        )


CALLS: dict[str, Callable[[Owned], object]] = {
    "open": lambda owned: owned.cache.open(owned.key, 9, 10),
    "record": lambda owned: owned.cache.record(owned.lease.explanation),
    "reserve": lambda owned: owned.cache.reserve(owned.lease, 14),
    "reserve what it has": lambda owned: owned.cache.reserve(owned.lease, 1),
    "capture": lambda owned: owned.cache.capture(owned.lease, 8),
    "capture_spare": lambda owned: owned.cache.capture_spare(owned.lease, 8),
    "take_back": lambda owned: owned.cache.take_back(owned.lease),
    "swap": lambda owned: owned.cache.swap(owned.lease),
    "advance": lambda owned: owned.cache.advance(owned.lease, 10),
    "commit": lambda owned: owned.cache.commit(owned.lease, owned.key, 10),
    "donate_states": lambda owned: owned.cache.donate_states(owned.lease, 10),
    "close": lambda owned: owned.cache.close(owned.lease),
    "pin": lambda owned: owned.cache.pin(owned.key),
    "pin what is not there": lambda owned: owned.cache.pin(key_of(owned.cache, "q")),
    "extend_pin": lambda owned: owned.cache.extend_pin(owned.pin, key_of(owned.cache, "abcd")),
    "unpin": lambda owned: owned.cache.unpin(owned.pin),
    "expire_next_pin": lambda owned: owned.cache.expire_next_pin(),
    "clear": lambda owned: owned.cache.clear(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_changes_something_is_refused_in_another_thread_and_changes_nothing(name: str) -> None:
    owned = Owned()
    before = owned.books()
    error = in_a_thread(lambda: CALLS[name](owned))
    assert isinstance(error, OwnershipError)
    assert "call adopt() in the thread that is to own it" in str(error)
    assert owned.books() == before
    owned.cache.audit()


def test_a_forked_process_owns_nothing_until_it_adopts() -> None:
    """Its calls are refused before they change anything; those of the parent are not."""
    owned = Owned()
    before = owned.books()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(OwnershipError, match="was forked from the one that owns this cache"):
                owned.cache.clear()
            assert owned.books() == before
            owned.cache.adopt()
            owned.cache.advance(owned.lease, 10)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    owned.cache.advance(owned.lease, 10)
    owned.cache.audit()


def test_the_owner_goes_on_after_another_was_refused() -> None:
    owned = Owned()
    assert isinstance(in_a_thread(owned.cache.clear), OwnershipError)
    owned.cache.advance(owned.lease, 10)
    owned.cache.commit(owned.lease, owned.key, 10)
    owned.cache.unpin(owned.pin)
    release(owned.cache)


def test_a_cache_that_nobody_has_used_belongs_to_the_first_who_does() -> None:
    cache = audited_cache(num_pages=16, num_states=8)
    assert in_a_thread(lambda: serve(cache, key_of(cache, "ab"))) is None
    with pytest.raises(OwnershipError):
        cache.clear()


def test_asking_for_statistics_makes_nobody_the_owner() -> None:
    cache = audited_cache(num_pages=16, num_states=8)
    assert cache.stats().pages_free == 16
    assert in_a_thread(lambda: serve(cache, key_of(cache, "ab"))) is None


def test_a_thread_that_adopts_a_cache_owns_it_and_the_old_owner_does_not() -> None:
    owned = Owned()

    def take_over() -> None:
        owned.cache.adopt()
        owned.cache.close(owned.lease)

    assert in_a_thread(take_over) is None
    with pytest.raises(OwnershipError):
        owned.cache.unpin(owned.pin)
    owned.cache.adopt()
    owned.cache.unpin(owned.pin)
    release(owned.cache)


# Statistics


def within_bounds(stats: CacheStats, before: CacheStats) -> bool:
    """Each figure by itself: they need not belong to one moment. Counts only grow."""
    grows = ("requests", "prompt_tokens", "usable_tokens", "page_tokens", "evicted_pages", "evicted_checkpoints")
    return (
        all(0 <= getattr(before, name) <= getattr(stats, name) for name in (*grows, "moved_pages"))
        and all(
            0 <= figure <= stats.pages_total for figure in (stats.pages_free, stats.pages_cached, stats.pages_private)
        )
        and all(
            0 <= figure <= stats.states_total for figure in (stats.states_free, stats.checkpoints, stats.states_private)
        )
        and 0 <= stats.pins <= 1
        and stats.policy_failure is None
    )


@pytest.mark.parametrize("is_elastic", [False, True])
def test_statistics_may_be_asked_from_another_thread_at_any_time(is_elastic: bool) -> None:
    config = CacheConfig(page_size=2, chunk_size=2, eviction="lru")
    memory = CacheMemory.of_bytes(9 * 384, 128, 192) if is_elastic else CacheMemory.of_indices(12, 6)
    cache = HybridCache(memory, config)
    random, num_asked, wrong, done = Random(0), 0, list[object](), threading.Event()

    def ask() -> None:
        nonlocal num_asked
        before = cache.stats()
        while not done.is_set() and not wrong:
            try:
                stats = cache.stats()
            except BaseException as error:
                wrong.append(error)
                raise
            if not within_bounds(stats, before):
                wrong.append(stats)
            before = stats
            num_asked += 1

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for number in range(2000):
            serve(cache, key_of(cache, "".join(random.choice("abc") for _ in range(random.randint(1, 5)))))
            if number % 50 == 0:
                pin = cache.pin(key_of(cache, "a"))
                if pin is not None:
                    cache.unpin(pin)
    finally:
        done.set()
        asking.join()
        sys.setswitchinterval(switch)
    assert wrong == []
    assert num_asked > 100
    stats = cache.stats()
    assert stats.requests == 2000
    assert stats.evicted_pages > 100 and stats.evicted_checkpoints > 100
    cache.audit()
