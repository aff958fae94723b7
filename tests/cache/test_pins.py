"""Pins: prefixes that somebody wants kept, for a time, and within half of the memory."""

import copy
import gc
import math
import pickle
import time
from collections.abc import Callable
from random import Random

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.pins import MAX_PINNED, Pin
from hybrid.errors import MemoryBudgetError
from hybrid.memory.memory import CacheMemory
from support.caches import AuditedCache, audited_cache, key_of, release, serve, start


class Clock:
    """`time.monotonic` under control."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=16, num_states=8)


def pinned(cache: HybridCache, text: str, ttl: float = math.inf) -> Pin:
    """Serve a text and pin it."""
    serve(cache, key_of(cache, text))
    pin = cache.pin(key_of(cache, text), ttl)
    assert pin is not None
    cache.audit()
    return pin


def kept(cache: HybridCache, text: str) -> int:
    """Usable tokens of a text."""
    return cache.tree.peek(key_of(cache, text), 10**6).num_tokens


def locks(cache: HybridCache) -> int:
    return sum(node.page_locks + node.state_locks for _, node in cache.tree.nodes())


def books(cache: HybridCache) -> tuple[object, ...]:
    """Return what a call that changed nothing leaves alone."""
    pins = sorted((pin.num_tokens, pin.expires) for pin in cache.pins)
    return cache.stats(), pins, locks(cache), sorted(map(id, cache.pins))


def test_what_is_pinned_survives_clear(cache: AuditedCache) -> None:
    pin = pinned(cache, "ab")
    serve(cache, key_of(cache, "xyz"))
    cache.clear()
    assert (pin.num_tokens, kept(cache, "ab"), kept(cache, "xyz")) == (4, 4, 0)
    assert cache.stats().pins == 1


def test_what_is_pinned_survives_pressure_from_both_kinds(cache: AuditedCache) -> None:
    pinned(cache, "ab")
    for letter in "cdefghijklmn":
        serve(cache, key_of(cache, letter * 14))  # all pages but the two that are pinned
    assert kept(cache, "ab") == 4
    cache.evict_checkpoints(8)
    cache.evict_pages(16)
    assert (kept(cache, "ab"), cache.stats().pages_cached, cache.stats().checkpoints) == (4, 2, 1)


def test_what_pins_keep_is_not_counted_on_when_memory_is_taken(cache: AuditedCache) -> None:
    pinned(cache, "ab")
    before = books(cache)
    assert cache.open(key_of(cache, "x" * 15), 29, 30) is None
    assert books(cache) == before


def test_the_usable_part_of_a_key_is_pinned(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    pin = cache.pin(key_of(cache, "abxyz"))
    assert pin is not None
    assert pin.num_tokens == 4


def test_nothing_is_pinned_where_nothing_is_usable(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    assert cache.pin(key_of(cache, "xy")) is None
    assert cache.pin(key_of(cache, "ab", "other")) is None
    cache.evict_checkpoints(1)
    assert cache.pin(key_of(cache, "ab")) is None  # pages alone serve nobody
    assert cache.stats().pins == 0


def test_a_pin_that_is_let_go_of_goes_as_everything_does(cache: AuditedCache) -> None:
    pin = pinned(cache, "ab")
    cache.unpin(pin)
    cache.audit()
    assert (cache.stats().pins, locks(cache)) == (0, 0)
    release(cache)


def test_letting_go_twice_does_no_harm(cache: AuditedCache) -> None:
    first, second = pinned(cache, "ab"), cache.pin(key_of(cache, "ab"))
    for _ in range(3):
        cache.unpin(first)
        cache.audit()
    cache.clear()
    assert (cache.stats().pins, kept(cache, "ab")) == (1, 4)
    assert second is not None
    cache.unpin(second)
    release(cache)


def test_a_pin_of_another_cache_is_not_ours_to_let_go(cache: AuditedCache) -> None:
    other = audited_cache(num_pages=16, num_states=8)
    pin = pinned(other, "ab")
    cache.unpin(pin)
    other.clear()
    assert kept(other, "ab") == 4


def test_a_pin_does_not_stand_in_the_way_of_those_who_use_it(cache: AuditedCache) -> None:
    pinned(cache, "ab")
    lease = start(cache, key_of(cache, "abc"))
    assert lease.num_hit_tokens == 4
    cache.close(lease)
    assert cache.stats().pins == 1


# Time to live


@pytest.mark.parametrize("call", ["open", "pin"])
def test_a_pin_ends_with_its_time(cache: AuditedCache, clock: Clock, call: str) -> None:
    pinned(cache, "ab", ttl=10)
    pinned(cache, "cd", ttl=20)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: cache.close(start(cache, key_of(cache, "x"))),
        "pin": lambda: cache.pin(key_of(cache, "x")),
    }
    clock.now += 9.9
    calls[call]()
    assert cache.stats().pins == 2
    clock.now += 0.1
    calls[call]()
    cache.audit()
    assert cache.stats().pins == 1
    cache.clear()
    assert (kept(cache, "ab"), kept(cache, "cd")) == (0, 4)


def test_without_a_time_a_pin_does_not_end(cache: AuditedCache, clock: Clock) -> None:
    pinned(cache, "ab")
    clock.now += 1e12
    cache.close(start(cache, key_of(cache, "x")))
    assert cache.stats().pins == 1


def test_letting_go_of_a_pin_whose_time_is_over_does_no_harm(cache: AuditedCache, clock: Clock) -> None:
    pin = pinned(cache, "ab", ttl=1)
    clock.now += 2
    serve(cache, key_of(cache, "x"))
    cache.unpin(pin)
    cache.extend_pin(pin, key_of(cache, "ab"))
    cache.audit()
    assert (cache.stats().pins, locks(cache)) == (0, 0)


# Half of the memory


def test_pins_keep_half_of_the_pages_at_most_and_one_more_changes_nothing(cache: AuditedCache) -> None:
    pinned(cache, "abcd")
    pinned(cache, "efgh")  # half of sixteen pages
    serve(cache, key_of(cache, "i"))
    before = books(cache)
    with pytest.raises(MemoryBudgetError, match="over half of the memory"):
        cache.pin(key_of(cache, "i"))
    cache.audit()
    assert books(cache) == before
    assert cache.pin(key_of(cache, "abcd")) is not None  # it is kept already


def test_pins_keep_half_of_the_checkpoints_at_most() -> None:
    cache = audited_cache(num_pages=32, num_states=6)
    for letter in "abc":
        pinned(cache, letter)
    with pytest.raises(MemoryBudgetError):
        pinned(cache, "d")
    assert cache.stats().pins == 3


def test_shared_pages_are_counted_once(cache: AuditedCache) -> None:
    for text in ("abcdef", "abcdeg", "abcdeh"):
        pinned(cache, text)
    with pytest.raises(MemoryBudgetError):
        pinned(cache, "xyz")
    assert cache.pin(key_of(cache, "abcde")) is not None  # the branching point: pages that are kept already
    assert cache.stats().pins == 4


def test_in_one_budget_pages_and_checkpoints_count_together() -> None:
    config = CacheConfig(page_size=2, chunk_size=2, eviction="lru")
    cache = HybridCache(CacheMemory.of_bytes(10 * 256, 64, 256), config)  # ten pieces of four pages or a state
    for index in range(4):
        pinned(cache, chr(ord("a") + index))  # a tenth for the state, a fortieth for the page
    before = books(cache)
    pinned_share = 4 * (1 / 10 + 1 / 40)
    assert pinned_share == MAX_PINNED
    serve(cache, key_of(cache, "z"))
    with pytest.raises(MemoryBudgetError):
        cache.pin(key_of(cache, "z"))
    assert books(cache)[1:] == before[1:]
    cache.audit()


# Extending


def test_a_pin_follows_what_is_usable_by_now(cache: AuditedCache) -> None:
    pin = pinned(cache, "ab")
    serve(cache, key_of(cache, "abcd"))
    cache.extend_pin(pin, key_of(cache, "abcd"))
    cache.audit()
    assert pin.num_tokens == 8
    cache.clear()
    assert kept(cache, "abcd") == 8
    assert cache.tree.num_checkpoints == 1
    cache.unpin(pin)
    release(cache)


def test_a_pin_that_would_become_too_large_stays_as_it_was(cache: AuditedCache) -> None:
    pin = pinned(cache, "ab")
    serve(cache, key_of(cache, "abcdefghi"))
    before = books(cache)
    with pytest.raises(MemoryBudgetError):
        cache.extend_pin(pin, key_of(cache, "abcdefghi"))
    cache.audit()
    assert books(cache) == before
    cache.clear()
    assert (pin.num_tokens, kept(cache, "ab"), kept(cache, "abcdefghi")) == (4, 4, 4)


def test_a_pin_that_was_let_go_of_is_not_revived(cache: AuditedCache) -> None:
    pin = pinned(cache, "ab")
    cache.unpin(pin)
    cache.extend_pin(pin, key_of(cache, "ab"))
    cache.audit()
    assert (cache.stats().pins, locks(cache)) == (0, 0)


def test_a_pin_stays_where_nothing_of_the_key_is_usable(cache: AuditedCache) -> None:
    pin = pinned(cache, "ab")
    cache.extend_pin(pin, key_of(cache, "xy"))
    cache.audit()
    assert (pin.num_tokens, cache.stats().pins) == (4, 1)


# Giving up


def test_the_pin_that_would_end_first_is_given_up(cache: AuditedCache, clock: Clock) -> None:
    for text, ttl in (("a", math.inf), ("b", 5.0), ("c", 50.0)):
        pinned(cache, text, ttl)
    gone = []
    while cache.expire_next_pin():
        cache.audit()
        cache.clear()
        gone.append([text for text in "abc" if not kept(cache, text)])
    assert gone == [["b"], ["b", "c"], ["a", "b", "c"]]
    assert not cache.expire_next_pin()


def test_pins_end_in_the_order_of_their_times_however_many_came_and_went(cache: AuditedCache, clock: Clock) -> None:
    rng, key = Random(0), key_of(cache, "ab")
    serve(cache, key)
    ends: dict[Pin, float] = {}
    for _ in range(300):
        ttl = rng.choice([5, 10, 20, 40, math.inf])
        pin = cache.pin(key, ttl)
        assert pin is not None
        ends[pin] = clock.now + ttl
        clock.now += rng.random()
        if rng.random() < 0.4:
            gone = rng.choice(list(ends))
            cache.unpin(gone)
            del ends[gone]
        cache.pins.expire()
        ends = {pin: end for pin, end in ends.items() if end > clock.now}
        assert set(cache.pins) == set(ends)
    while ends:
        first = min(ends.values())
        assert cache.expire_next_pin()
        (gone,) = set(ends) - set(cache.pins)
        assert ends.pop(gone) == first
    assert not cache.expire_next_pin()


def test_pins_that_were_let_go_of_do_not_pile_up(cache: AuditedCache) -> None:
    kept = pinned(cache, "ab")
    for _ in range(500):
        pin = cache.pin(key_of(cache, "ab"))
        assert pin is not None
        cache.unpin(pin)
    assert set(cache.pins) == {kept}
    assert sum(type(thing) is Pin for thing in gc.get_objects()) < 100


def test_a_copy_of_a_pin_is_that_pin_and_one_from_elsewhere_has_ended(cache: AuditedCache) -> None:
    """Only a name is sent to another process, and nothing of what the cache holds."""
    pin = pinned(cache, "ab")
    before = books(cache)
    sent = pickle.dumps(pin)
    assert len(sent) < 200
    cache.unpin(pickle.loads(sent))
    assert books(cache) == before
    cache.unpin(copy.deepcopy({"pin": pin})["pin"])
    assert cache.stats().pins == 0
