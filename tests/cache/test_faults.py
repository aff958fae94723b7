"""Nothing is lost on failure: every allocation of a busy cache fails once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from hybrid.key import Key
from hybrid.memory.arena import ArenaPool
from hybrid.memory.pool import IndexPool
from hybrid.tree.ghosts import Ghosts
from hybrid.tree.node import Checkpoint, Node
from support.caches import AuditedCache, RandomWorkload, TreeCase, audited_cache, key_of, prefill, release, serve, start
from support.elastic import ONE, elastic

NUM_ACTIONS = 80


@contextmanager
def failing(at: int | None, error: type[BaseException] | None) -> Iterator[Callable[[], int]]:
    """The allocation of number `at` yields nothing, or raises. Gives a function that counts the allocations.

    The books are proven from that one on: before it they are those of the run in which nothing fails (`at=None`).
    """
    num_calls = 0

    def counting(kind: type[IndexPool] | type[ArenaPool]) -> Callable[..., list[int] | None]:
        allocate = kind.allocate

        def counted(pool: Any, count: int) -> list[int] | None:
            nonlocal num_calls
            num_calls += 1
            if num_calls - 1 != at:
                return allocate(pool, count)
            if error is not None:
                raise error("planted")
            return None

        return counted

    audit = AuditedCache.audit

    def audit_from_there(cache: AuditedCache) -> None:
        if at is None or num_calls > at:
            audit(cache)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (IndexPool, ArenaPool):
            patch.setattr(kind, "allocate", counting(kind))
        patch.setattr(AuditedCache, "audit", audit_from_there)
        yield lambda: num_calls


def busy_cache(memory: str = "fixed") -> tuple[AuditedCache, RandomWorkload]:
    """A cache too small for its requests: they share, evict, and are retracted."""
    if memory == "fixed":
        cache = audited_cache(num_pages=14, num_states=6, page_size=2, chunk_size=4)
    else:
        cache = elastic(10, ONE, chunk_size=4, stored_bytes=64 if memory == "stored smaller" else None)
    return cache, RandomWorkload(cache, seed=7, has_faults=True)


MEMORIES = pytest.mark.parametrize("memory", ["fixed", "one budget", "stored smaller"])

# hundreds of runs over the same lines, which cost three times as much where lines are counted
UNCOUNTED = pytest.mark.usefixtures("untraced")


def count_allocations(memory: str) -> int:
    cache, workload = busy_cache(memory)
    with failing(None, None) as num_calls:
        workload.run(NUM_ACTIONS)
    stats = cache.stats()
    assert stats.evicted_pages > 5 and stats.evicted_checkpoints > 5 and workload.num_finished > 3
    return num_calls()


def recover(cache: AuditedCache, workload: RandomWorkload) -> None:
    """Whatever failed: what is open can be closed, nothing is leaked, and the cache goes on serving right contents."""
    for lease in list(cache.leases):
        cache.close(lease)
    stats = cache.stats()
    assert (stats.pages_private, stats.states_private) == (0, 0)
    assert sum(node.page_locks + node.state_locks for _, node in cache.tree.nodes()) == 0
    workload.running.clear()
    num_finished = workload.num_finished
    while workload.num_finished < num_finished + 3:
        workload.act()
    release(cache)


@MEMORIES
def test_the_workload_allocates_often_enough_to_prove_something(memory: str) -> None:
    assert count_allocations(memory) > 40


@UNCOUNTED
@MEMORIES
def test_an_allocation_that_yields_nothing_is_survived_wherever_it_happens(memory: str) -> None:
    for at in range(0, count_allocations(memory), 3):
        cache, workload = busy_cache(memory)
        with failing(at, None):
            workload.run(NUM_ACTIONS)
        recover(cache, workload)


def test_an_insert_that_was_refused_can_be_made_right() -> None:
    case = TreeCase(page_size=2, grid=4)
    with pytest.raises(Exception, match="insert"):
        case.tree.insert(Key.of([1, 1, 2, 2]), 4, [0, 1], Checkpoint(1, 2))
    assert case.tree.insert(Key.of([1, 1, 2, 2]), 4, [0, 1], Checkpoint(1, 4)).adopted


def test_a_lease_goes_on_after_a_step_that_had_no_memory() -> None:
    cache = audited_cache(num_pages=4, num_states=4)
    one = prefill(cache, key_of(cache, "abc"))
    two = cache.open(key_of(cache, "x"), 1, 2)
    assert two is not None
    assert not cache.reserve(two, 4)
    cache.close(one)
    assert cache.reserve(two, 4)
    cache.close(two)
    release(cache)


@pytest.mark.parametrize("at", [0, 4])
def test_an_eviction_that_cannot_remember_what_it_evicts_evicts_all_the_same(at: int) -> None:
    cache, workload = busy_cache()
    remember, calls = Ghosts.remember, count()

    def failing_remember(ghosts: Ghosts, node: Node, keep: int) -> None:
        if next(calls) >= at:
            raise MemoryError("planted")
        remember(ghosts, node, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ghosts, "remember", failing_remember)
        workload.run(NUM_ACTIONS)
    assert next(calls) > at
    recover(cache, workload)


def test_what_was_evicted_before_something_raised_is_free_and_the_rest_can_still_go() -> None:
    """The third victim's turn raises: two are free, and the books balance."""
    cache = audited_cache(num_pages=8, num_states=8)
    for letter in "abcd":
        serve(cache, key_of(cache, letter * 2))
    find, calls = cache.tree.candidates.next_leaf, count()

    def failing_find() -> Node | None:
        if next(calls) == 2:
            raise MemoryError("planted")
        return find()

    cache.tree.candidates.next_leaf = failing_find  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        cache.open(key_of(cache, "x" * 7), 13, 14)
    cache.audit()
    assert cache.stats().pages_free == 4
    lease = start(cache, key_of(cache, "y" * 8))
    cache.close(lease)
    release(cache)
