"""The heap of items that may be removed, or change their keys: against a sorted list, and what it costs."""

import random

import pytest

from hybrid.lazy_heap import LazyHeap
from support.calls import calls_of


@pytest.mark.parametrize("seed", range(20))
def test_walks_are_those_of_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    heap: LazyHeap[str] = LazyHeap()
    naive: dict[str, tuple[int, int]] = {}
    for step in range(400):
        name = f"item {rng.randrange(60)}"
        if name in naive and rng.random() < 0.5:
            assert heap.remove(name) == naive.pop(name)[0]
        else:
            naive[name] = rng.randrange(8), step
            heap.put(name, naive[name][0])
        assert len(heap) == len(naive)
        assert (name in heap) == (name in naive)
        lowest = min(naive, key=naive.__getitem__, default=None)
        assert heap.first == ((naive[lowest][0], lowest) if lowest is not None else None)
        if step % 10 == 0:
            assert list(heap.walk()) == [(naive[item][0], item) for item in sorted(naive, key=lambda n: naive[n])]


def test_what_is_removed_during_a_walk_is_passed_over() -> None:
    heap: LazyHeap[int] = LazyHeap()
    for item in range(100):
        heap.put(item, item)
    visited = []
    for _, item in heap.walk():
        visited.append(item)
        for gone in range(item, min(item + 3, 100)):
            heap.remove(gone)
    assert visited == list(range(0, 100, 3))
    assert not heap and not list(heap.walk())


def test_removing_what_is_not_there_is_refused() -> None:
    heap: LazyHeap[int] = LazyHeap()
    with pytest.raises(KeyError):
        heap.remove(1)


def test_memory_is_of_what_is_in_it() -> None:
    heap: LazyHeap[int] = LazyHeap()
    for item in range(10_000):
        heap.put(item, 0)
        if item >= 10:
            heap.remove(item - 10)
    assert len(heap) == 10
    assert calls_of(lambda: list(heap.walk())) < 300


@pytest.mark.parametrize("size", [100, 20_000])
def test_the_first_of_many_cost_no_more_than_those_of_few(size: int) -> None:
    heap: LazyHeap[int] = LazyHeap()
    for item in range(2 * size):
        heap.put(item, item % 5)
    for item in range(size // 4):  # the first, as those that have started
        heap.remove(5 * item)
    walk = heap.walk()
    next(walk)
    assert calls_of(lambda: [next(walk) for _ in range(50)]) < 1500
