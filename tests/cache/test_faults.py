"""Nothing is lost on failure: every allocation of a busy cache fails once, in each way it can."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.errors import AuditError
from hybrid.key import Key
from hybrid.memory.arena import ArenaPool
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import IndexPool
from hybrid.tree import forest, locks, pools, tree
from hybrid.tree.ghosts import Ghosts
from hybrid.tree.node import Checkpoint, Node, Released
from support.caches import AuditedCache, RandomWorkload, TreeCase, audited_cache, key_of, prefill, release, serve, start
from support.elastic import ONE, elastic
from support.planted import Planted, PlantedError

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
    for at in range(count_allocations(memory)):
        cache, workload = busy_cache(memory)
        with failing(at, None):
            workload.run(NUM_ACTIONS)
        recover(cache, workload)


@UNCOUNTED
@MEMORIES
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_allocation_that_raises_leaves_the_books_balanced_wherever_it_happens(
    error: type[BaseException], memory: str
) -> None:
    for at in range(count_allocations(memory)):
        cache, workload = busy_cache(memory)
        with failing(at, error), pytest.raises(error, match="planted"):
            workload.run(NUM_ACTIONS)
        recover(cache, workload)


@pytest.mark.parametrize("at", [0, 1])
def test_an_open_that_raises_leaves_no_lease_and_no_lock_behind(at: int) -> None:
    """At 0 the front slot fails, at 1 the pages."""
    cache = audited_cache(num_pages=8, num_states=4)
    serve(cache, key_of(cache, "ab"))
    before = cache.stats()
    with failing(at, MemoryError), pytest.raises(MemoryError):
        start(cache, key_of(cache, "abc"))
    cache.audit()
    assert cache.leases == set()
    assert cache.stats() == before


class Failing:
    """A constructor of which the call of number `at` raises."""

    def __init__(self, constructor: Callable[..., object], at: int) -> None:
        self.constructor, self.calls_left = constructor, at

    def __call__(self, *args: object, **options: object) -> object:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise MemoryError("planted")
        return self.constructor(*args, **options)


@pytest.mark.parametrize(
    ("module", "name", "num_calls"),
    [(forest, "Node", 2), (forest, "NodeUsage", 1), (tree, "NodeUsage", 1), (pools, "array", 1)],
)
def test_an_insert_that_breaks_off_changes_nothing_that_can_be_seen(
    module: ModuleType, name: str, num_calls: int
) -> None:
    """A fork makes two nodes, the upper half of the split one and the leaf: each fails in turn.

    abcd *      inserting abxy*       ab o
                                        cd *
                                        xy *
    """
    for at in range(num_calls):
        case = TreeCase()
        case.put("abcd*")
        lock = case.tree.lock_state(case.node("abcd"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, Failing(getattr(module, name), at))
            with pytest.raises(MemoryError):
                case.put("abxy*")
        assert case.peek("abcd")[:2] == (8, 8)
        assert case.peek("abxy")[:2] == (0, 4)
        assert (case.tree.num_pages, case.tree.num_checkpoints) == (4, 1)
        assert case.put("abxy*").adopted
        assert case.draw() == ["ab o", "  cd *", "  xy *"]
        case.tree.unlock(lock)
        assert len(case.tree.evict_all().pages) == 6


@pytest.mark.parametrize(("module", "name"), [(forest, "Node"), (tree, "NodeUsage"), (tree, "Root")])
def test_a_first_insert_that_breaks_off_makes_no_namespace(module: ModuleType, name: str) -> None:
    case = TreeCase()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, Failing(getattr(module, name), 0))
        with pytest.raises(MemoryError):
            case.put("ab*", "tenant")
    assert not case.tree.knows("tenant")
    assert (case.tree.num_pages, case.tree.num_checkpoints) == (0, 0)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_commit_that_breaks_off_leaves_pages_and_checkpoints_with_the_lease(at: int) -> None:
    """The first checkpoint splits (0) and hangs a leaf (1); the second hangs another (2)."""
    cache = audited_cache(num_pages=16, num_states=8)
    key = key_of(cache, "abxyz")
    lease = start(cache, key)
    serve(cache, key_of(cache, "abcd"))
    cache.capture(lease, 6)
    cache.capture(lease, 10)
    cache.advance(lease, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "Node", Failing(Node, at))
        with pytest.raises(MemoryError):
            cache.commit(lease, key, 10)
    cache.audit()
    assert len(lease.captured) == (2 if at < 2 else 1)
    cache.commit(lease, key, 10)
    assert lease.captured == []
    assert cache.tree.peek(key, 10)[:2] == (10, 10)
    cache.close(lease)
    release(cache)


@pytest.mark.parametrize("other", ["", "abcd", "abxyz"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_commit_that_cannot_lock_leaves_no_page_with_two_owners(at: int, other: str) -> None:
    """What another request committed meanwhile is nothing, a part, or all of it."""
    cache = audited_cache(num_pages=20, num_states=8)
    key = key_of(cache, "abxyz")
    lease = start(cache, key)
    if other:
        serve(cache, key_of(cache, other))
    cache.capture(lease, 6)
    cache.advance(lease, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "PageLock", Failing(locks.PageLock, at))
        with contextlib.suppress(MemoryError):
            cache.commit(lease, key, 4)
            cache.commit(lease, key, 10)
    cache.audit()
    cache.close(lease)
    assert (cache.stats().pages_private, cache.stats().states_private) == (0, 0)
    serve(cache, key)
    release(cache)


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


def gone(case: TreeCase) -> int:
    return len(case.tree.evict_all().pages)


def test_a_cut_that_breaks_off_leaves_the_leaf_whole_and_evictable() -> None:
    case = TreeCase()
    case.put("abcd*")
    released = Released()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "NodeUsage", Failing(forest.NodeUsage, 0))
        with pytest.raises(MemoryError):
            case.tree.evict_pages(2, released)
    assert (list(released.pages), released.slots) == ([], [1])  # its checkpoint had gone before
    assert case.peek("abcd").num_page_tokens == 8
    assert (case.tree.num_pages, case.tree.num_checkpoints) == (4, 0)
    assert gone(case) == 4


@pytest.mark.parametrize("at", range(12))
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


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("policy", ["lru", "lfu", "lhd", "flop_aware"])
def test_the_audit_finds_a_queue_of_candidates_that_an_exception_has_left_inconsistent(policy: str) -> None:
    """Where it finds nothing, all that is cached can still be evicted."""
    line, planted, found = 0, Planted(0), 0
    while not line or planted.was_raised:
        line += 1
        cache = HybridCache(CacheMemory.of_indices(64, 32), CacheConfig(page_size=2, chunk_size=2, eviction=policy))
        for text in ("abcd", "abxy", "efgh", "efop"):
            serve(cache, key_of(cache, text))
        planted = Planted(line, "tree/candidates.py")
        try:
            with planted.traced():
                cache.allocator.evict(cache.tree.evict_checkpoints, 2)
                serve(cache, key_of(cache, "qr"))
                cache.allocator.evict(cache.tree.evict_pages, 3)
            cache.audit()
        except PlantedError:
            for lease in [*cache.leases]:
                cache.close(lease)
            try:
                cache.audit()
            except AuditError:
                found += 1
                continue
        release(cache)
    assert line > 30
    assert found
