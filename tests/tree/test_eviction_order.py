"""The queues of candidates for eviction."""

from array import array
from random import Random

import pytest

from hybrid.tree.candidates import SAMPLE, OrderedQueue, SampledQueue
from hybrid.tree.node import Node, NodeUsage


def node(tick: int) -> Node:
    return Node(None, b"", array("i"), 0, NodeUsage(tick, tick))


def recency(node: Node) -> float:
    return node.usage.last_used


def take(queue: OrderedQueue) -> Node | None:
    found = queue.peek()
    if found is None:
        return None
    queue.pop(found[1])
    return found[1]


@pytest.mark.parametrize("falls", [False, True])
def test_the_queue_stays_small_however_often_its_candidates_are_used(falls: bool) -> None:
    queue = OrderedQueue(recency, lambda _: True, falls)
    nodes = [node(0) for _ in range(10)]
    for tick in range(20_000):
        nodes[tick % 10].usage.last_used = tick
        queue.push(nodes[tick % 10], renewed=False)
        queue.used(nodes[tick % 10])
        assert len(queue) <= 1025
    gone: list[Node] = []
    while (next_one := take(queue)) is not None:
        if next_one not in gone:
            gone.append(next_one)
    assert gone == nodes


def test_what_is_no_candidate_any_more_leaves_a_queue_that_looks_at_samples() -> None:
    """Though a sample, drawn with replacement, has some of them more than once."""
    nodes = [node(tick) for tick in range(8 * SAMPLE)]
    live = set(nodes[::7])
    queue = SampledQueue(recency, recency, live.__contains__, Random(0))
    for one in nodes:
        queue.push(one, renewed=False)
    for _ in range(100):
        found = queue.peek()
        assert found is not None
        assert found[1] in live
    assert len(queue) < len(live) + SAMPLE
    assert all(one in queue for one in live)


def test_candidates_of_equal_rank_go_in_the_order_in_which_they_came() -> None:
    queue = OrderedQueue(lambda _: 1.0, lambda _: True, falls=False)
    nodes = [node(3), node(1), node(2)]
    for one in nodes:
        queue.push(one, renewed=False)
    for _ in range(2000):  # so often that the queue tidies itself
        queue.push(nodes[0], renewed=False)
    assert [take(queue) for _ in range(3)] == nodes


def test_entering_a_candidate_costs_a_few_rankings_however_many_there_are() -> None:
    num_rankings = 0

    def rank(one: Node) -> float:
        nonlocal num_rankings
        num_rankings += 1
        return one.usage.last_used

    queue = OrderedQueue(rank, lambda _: True, falls=False)
    for tick in range(20_000):
        queue.push(node(tick), renewed=False)
    assert num_rankings < 5 * 20_000


def test_a_candidate_whose_rank_has_changed_goes_by_its_present_one() -> None:
    queue = OrderedQueue(recency, lambda _: True, falls=False)
    early, late = node(1), node(2)
    for one in (early, late):
        queue.push(one, renewed=False)
    early.usage.last_used = 3
    queue.push(early, renewed=False)
    assert [take(queue) for _ in range(3)] == [late, early, None]


def test_what_is_no_candidate_any_more_is_passed_over() -> None:
    a, b, c = node(1), node(2), node(3)
    kept = {id(b)}
    queue = OrderedQueue(lambda _: 1.0, lambda one: id(one) not in kept, falls=False)
    for one in (a, b, c):
        queue.push(one, renewed=False)
    assert [take(queue) for _ in range(3)] == [a, c, None]
    kept.clear()
    queue.push(b, renewed=False)
    assert take(queue) is b
