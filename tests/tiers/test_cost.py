"""The cost of a transfer is learned from transfers of any size."""

from random import Random

import pytest

from hybrid.tiers.cost import Cost, MeasuredTime


def test_latency_and_bytes_are_told_apart() -> None:
    cost, rng = Cost(0.0, 1e-10), Random(0)
    for _ in range(40):
        size = rng.choice((1000, 10**6, 10**8))
        cost.note(size, 2e-3 + size * 3e-9)
    for size in (0, 10**5, 10**8):
        assert cost.seconds(size) == pytest.approx(2e-3 + size * 3e-9, rel=0.2)


def test_transfers_of_one_size_are_predicted_for_that_size() -> None:
    cost = Cost(5e-4, 1e-9)
    for _ in range(10):
        cost.note(5 * 10**6, 0.02)
    assert cost.seconds(5 * 10**6) == pytest.approx(0.02, rel=0.1)


def test_small_transfers_do_not_make_large_ones_slow() -> None:
    cost = Cost(5e-4, 1e-9)
    for _ in range(20):
        cost.note(4, 1e-3)
    assert cost.seconds(10**8) < 0.5


def test_what_is_slow_is_forgotten_in_the_end() -> None:
    cost, rate = Cost(5e-4, 1e-9), MeasuredTime(1.0)
    cost.note(1000, 10.0)
    rate.note(1, 10.0)
    for _ in range(1000):
        cost.fade()
        rate.fade()
    assert cost.seconds(1000) < 0.001
    assert rate.value < 0.001
