"""The queue of policies that rank a whole sample at once."""

from array import array
from random import Random

import numpy as np

from hybrid.tree.candidates import LARGE_SAMPLE, AgingQueue
from hybrid.tree.node import Node, NodeUsage
from hybrid.tree.policy import Floats, Ints


class Case:
    """Candidates whose weights are by their id; ranks are weights."""

    def __init__(self, number: int) -> None:
        self.nodes = [Node(None, b"", array("i"), 0, NodeUsage(tick, tick)) for tick in range(number)]
        self.weights = {id(node): float(tick * 7919 % 1009) for tick, node in enumerate(self.nodes)}
        self.locked: set[Node] = set()
        self.num_weighed = 0
        self.queue = AgingQueue(self.weigh, self.ranks, self.is_candidate, Random(3))
        for node in self.nodes:
            self.queue.push(node, renewed=False)

    def weigh(self, node: Node) -> tuple[int, float, float]:
        self.num_weighed += 1
        return 0, self.weights[id(node)], self.weights[id(node)]

    def ranks(self, groups: Ints, weights: Floats, used: Ints) -> tuple[Floats, int]:
        return weights.copy(), int(weights.argmin())

    def is_candidate(self, node: Node) -> bool:
        return node not in self.locked

    def take(self) -> Node | None:
        found = self.queue.peek()
        if found is None:
            return None
        self.queue.pop(found[1])
        return found[1]

    def in_order(self) -> list[Node]:
        return sorted(self.nodes, key=lambda node: self.weights[id(node)])


def test_of_as_many_as_a_sample_has_the_lowest_goes_first_and_what_is_locked_stays() -> None:
    case = Case(LARGE_SAMPLE)
    case.locked = set(case.nodes[::5])
    expected = [node for node in case.in_order() if node not in case.locked]
    assert [case.take() for _ in expected] == expected
    assert case.take() is None
    assert len(case.queue) == 0
    freed = case.locked.pop()
    case.queue.push(freed, renewed=False)
    assert case.take() is freed


def test_what_has_risen_unnoticed_is_weighed_again_before_it_goes_and_what_has_fallen_once_it_is_told() -> None:
    case = Case(LARGE_SAMPLE)
    lowest, second, *_, highest = case.in_order()
    case.queue.peek()
    case.weights[id(lowest)] = 2000.0
    case.queue.used(second)  # so that another sample is taken
    assert case.queue.peek() == (case.weights[id(second)], second)
    case.weights[id(highest)] = -1.0
    case.queue.changed(highest)
    assert case.take() is highest
    assert case.take() is second


def test_a_victim_among_many_is_low_costs_a_few_weighings_and_the_queue_drops_what_is_gone() -> None:
    case = Case(20 * LARGE_SAMPLE)
    for _ in range(40):
        case.take()  # what is new is weighed once
    ranks = np.array(sorted(case.weights.values()))
    before = case.num_weighed
    found = [case.queue.peek() for _ in range(3)]
    assert found[0] is not None
    assert found[0] == found[1] == found[2]
    assert case.num_weighed - before <= LARGE_SAMPLE
    assert found[0][0] <= ranks[len(ranks) // 4]
    case.locked = set(case.nodes)
    for tick in range(4 * len(case.nodes)):
        case.queue.push(Node(None, b"", array("i"), 0, NodeUsage(tick, tick)), renewed=False)
    assert case.nodes[0] not in case.queue
