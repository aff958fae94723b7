"""The rule for failures: an exception that leaves bookkeeping audits, and where the audit fails the cache is emptied.
Handlers of signals run after it."""

import signal
from contextlib import suppress
from types import FrameType

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError, OwnershipError
from hybrid.memory.memory import CacheMemory
from support.caches import RandomWorkload, key_of, release, serve
from support.planted import Planted, PlantedError
from support.threads import in_a_thread

ROOMS = ("cache/", "tree/", "memory/")


class TimeLimitError(Exception):
    """Raised by a handler."""


def full_cache(policy: str = "lru") -> HybridCache:
    """A cache that has to evict, and has evicted."""
    cache = HybridCache(CacheMemory.of_indices(14, 6), CacheConfig(page_size=2, chunk_size=4, eviction=policy))
    RandomWorkload(cache, seed=7, has_faults=True).run(40)
    release(cache)
    return cache


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("policy", ["lru", "lhd"])
@pytest.mark.filterwarnings("ignore::hybrid.PolicyWarning")
def test_an_exception_at_any_line_costs_cached_prefixes_and_no_answer(policy: str) -> None:
    """`RandomWorkload` compares every content that it reads with what was computed there."""
    num_resets, line, planted = 0, 1, Planted(0)
    while line == 1 or planted.was_raised:
        cache = full_cache(policy)
        workload = RandomWorkload(cache, seed=7, has_faults=True)
        planted = Planted(line, *ROOMS)
        with suppress(PlantedError), cache.bookkeeping(), planted.traced():
            workload.run(30)
        cache.audit()
        num_resets += cache.stats().resets
        for lease in [*cache.leases]:  # the requests start again
            cache.close(lease)
        workload.running.clear()
        workload.run(20)
        release(cache)
        line += 1 + line // 20
    assert line > 5000
    assert num_resets > 0


def test_handlers_run_after_bookkeeping_and_cost_nothing() -> None:
    cache, done = full_cache(), list[str]()

    def raising(number: int, frame: FrameType | None) -> None:
        done.append("handler")
        raise TimeLimitError

    @cache.bookkeeping()
    def work() -> None:
        with cache.bookkeeping():
            signal.raise_signal(signal.SIGALRM)
            serve(cache, key_of(cache, "abc"))
        done.append("end")

    before = signal.signal(signal.SIGALRM, raising)
    try:
        with pytest.raises(TimeLimitError):
            work()
        assert signal.getsignal(signal.SIGALRM) is raising
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == ["end", "handler"]
    assert cache.tree.peek(key_of(cache, "abc"), 6).num_tokens == 4
    assert cache.stats().resets == 0


def test_what_refuses_an_argument_does_not_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = full_cache()
    monkeypatch.setattr(cache, "audit", lambda: pytest.fail("audited"))
    with pytest.raises(ArgumentError), cache.bookkeeping():
        cache.open(key_of(cache, "ab"), 9, 4)


def test_the_exception_of_a_call_within_others_is_audited_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, order = full_cache(), list[str]()
    monkeypatch.setattr(cache, "audit", lambda: order.append("audit"))

    @cache.bookkeeping()
    def work() -> None:
        try:
            with cache.bookkeeping():
                raise PlantedError
        finally:
            order.append("outer")

    with pytest.raises(PlantedError):
        work()
    assert order == ["outer", "audit"]


def test_where_a_reset_is_broken_off_the_next_bookkeeping_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = full_cache()
    serve(cache, key_of(cache, "abc"))
    cache.memory.pages.allocate(1)
    with monkeypatch.context() as patch:
        patch.setattr(cache.memory, "reset", lambda: [][1])
        with pytest.raises(IndexError), cache.bookkeeping():
            raise PlantedError
    with cache.bookkeeping():
        assert cache.stats().resets > 0
        assert cache.stats().pages_cached == 0
    cache.audit()


def test_another_thread_is_refused() -> None:
    cache = full_cache()

    def work() -> None:
        with cache.bookkeeping():
            pytest.fail("entered")

    assert isinstance(in_a_thread(work), OwnershipError)
