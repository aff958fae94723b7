"""The queue of candidates for eviction, and the policies that rank them."""

import pytest

from hybrid.errors import ArgumentError
from hybrid.eviction import EvictionQueue, Usage, policy_named


def test_the_queue_stays_small_however_often_its_candidates_are_used() -> None:
    queue: EvictionQueue[Usage] = EvictionQueue(lambda usage: usage.last_used, lambda _: True)
    usages = [Usage(0, 0) for _ in range(10)]
    for tick in range(20_000):
        usages[tick % 10].last_used = tick
        queue.push(usages[tick % 10])
        assert len(queue._heap) <= 1025
    assert [queue.pop() for _ in range(11)] == [*usages, None]


def test_candidates_of_equal_rank_go_in_the_order_in_which_they_came() -> None:
    queue: EvictionQueue[Usage] = EvictionQueue(lambda _: 1.0, lambda _: True)
    usages = [Usage(3, 3), Usage(1, 1), Usage(2, 2)]
    for usage in usages:
        queue.push(usage)
    for _ in range(2000):  # so often that the queue tidies itself
        queue.push(usages[0])
    assert [queue.pop() for _ in range(3)] == usages


def test_entering_a_candidate_costs_a_few_rankings_however_many_there_are() -> None:
    num_rankings = 0

    def rank(usage: Usage) -> float:
        nonlocal num_rankings
        num_rankings += 1
        return usage.last_used

    queue: EvictionQueue[Usage] = EvictionQueue(rank, lambda _: True)
    for tick in range(20_000):
        queue.push(Usage(tick, tick))
    assert num_rankings < 5 * 20_000


def test_a_policy_is_chosen_by_name_and_a_wrong_name_tells_the_right_ones() -> None:
    assert policy_named("lru").rank(Usage(created=1, last_used=5)) == 5
    with pytest.raises(ArgumentError, match="lru"):
        policy_named("most recently bought")


def test_a_candidate_whose_rank_has_changed_goes_by_its_present_one() -> None:
    queue: EvictionQueue[Usage] = EvictionQueue(lambda usage: usage.last_used, lambda _: True)
    early, late = Usage(1, 1), Usage(2, 2)
    for usage in (early, late):
        queue.push(usage)
    early.last_used = 3
    queue.push(early)
    assert [queue.pop() for _ in range(3)] == [late, early, None]


def test_what_is_no_candidate_any_more_is_passed_over() -> None:
    kept: set[str] = {"b"}
    queue: EvictionQueue[str] = EvictionQueue(lambda _: 1.0, lambda name: name not in kept)
    for name in "abc":
        queue.push(name)
    assert [queue.pop() for _ in range(3)] == ["a", "c", None]
    kept.clear()
    queue.push("b")
    assert queue.pop() == "b"
