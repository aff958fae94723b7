"""The queue that is visited without taking out: against a sorted list, and what it costs."""

import random

import pytest

from hybrid.engine.waiting import PriorityQueue
from support.calls import calls_of


@pytest.mark.parametrize("seed", range(20))
def test_visits_are_those_of_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    queue: PriorityQueue[str] = PriorityQueue()
    naive: dict[str, tuple[int, int]] = {}
    for step in range(400):
        name = f"item {rng.randrange(60)}"
        if name in naive and rng.random() < 0.5:
            queue.remove(name)
            del naive[name]
        else:
            arrival = naive[name][1] if name in naive else step
            naive[name] = rng.randrange(8), arrival
            queue.put(name, naive[name][0])
        assert len(queue) == len(naive)
        assert (name in queue) == (name in naive)
        if step % 10 == 0:
            assert list(queue.visit()) == [(naive[item][0], item) for item in sorted(naive, key=lambda n: naive[n])]


def test_what_is_removed_during_a_visit_is_not_visited() -> None:
    queue: PriorityQueue[int] = PriorityQueue()
    for item in range(100):
        queue.put(item, item)
    visited = []
    for _, item in queue.visit():
        visited.append(item)
        for gone in range(item, min(item + 3, 100)):
            queue.remove(gone)
    assert visited == list(range(0, 100, 3))
    assert not queue and not list(queue.visit())


def test_removing_what_is_not_there_is_refused() -> None:
    queue: PriorityQueue[int] = PriorityQueue()
    with pytest.raises(KeyError):
        queue.remove(1)


def test_memory_is_of_what_is_in_it() -> None:
    queue: PriorityQueue[int] = PriorityQueue()
    for item in range(10_000):
        queue.put(item, 0)
        if item >= 10:
            queue.remove(item - 10)
    assert len(queue) == 10
    assert calls_of(lambda: list(queue.visit())) < 300


@pytest.mark.parametrize("size", [100, 20_000])
def test_the_first_of_many_cost_no_more_than_those_of_few(size: int) -> None:
    queue: PriorityQueue[int] = PriorityQueue()
    for item in range(2 * size):
        queue.put(item, item % 5)
    for item in range(size // 4):  # the first, as those that have started
        queue.remove(5 * item)
    visit = queue.visit()
    next(visit)
    assert calls_of(lambda: [next(visit) for _ in range(50)]) < 1500
