"""Exposure by cohorts, against counting each record at each request."""

import random
import tracemalloc

import numpy as np
import pytest

from hybrid.tree.lhd import ExposureCounts

EDGES = [0, 1, 2, 2, 4, 9, 20, 40]


def one_by_one(records: list[tuple[int, int]], num_groups: int, since: int, until: int) -> np.ndarray:
    """Every record at every request, in the last bin whose first age it has reached."""
    exposure = np.zeros((num_groups, len(EDGES)))
    for group, last in records:
        for now in range(max(since, last), until):
            exposure[group, max(at for at, edge in enumerate(EDGES) if edge <= now - last)] += 1
    return exposure


@pytest.mark.parametrize("max_noted", [2, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_cohorts_count_what_records_one_by_one_would(
    monkeypatch: pytest.MonkeyPatch, seed: int, max_noted: int
) -> None:
    """Over so many requests that the columns are used again several times; records come and go at any request, even
    before the last use that they are noted with."""
    monkeypatch.setattr("hybrid.tree.lhd.MAX_NOTED", max_noted)
    dice, cohorts, now = random.Random(seed), ExposureCounts(EDGES), 0
    records: list[tuple[int, int]] = []
    while now < 600:
        expected = np.zeros((20, len(EDGES)))
        for _ in range(dice.randrange(1, 19)):
            for _ in range(dice.choice((0, 0, 1, 2))):
                records.append((dice.randrange(20), dice.randrange(max(0, now - 60), now + 3)))
                cohorts.join(*records[-1], now)
            for _ in range(dice.choice((0, 0, 1))):
                if records:
                    cohorts.leave(*records.pop(dice.randrange(len(records))), now)
            expected += one_by_one(records, 20, now, now + 1)
            now += 1
        assert cohorts.exposure(20, now) == pytest.approx(expected)


def test_more_records_than_a_short_integer_counts_may_come_at_one_request() -> None:
    """Records of a file that is loaded between two requests come at one request."""
    cohorts = ExposureCounts(EDGES)
    for _ in range(40_000):
        cohorts.join(0, 5, 5)
    assert cohorts.exposure(1, 10).sum() == 40_000 * 5


def test_a_group_not_seen_yet_and_a_long_pause_are_no_error() -> None:
    cohorts = ExposureCounts(EDGES)
    for _ in range(3):
        cohorts.join(100, 5, 5)
    assert cohorts.exposure(101, 7)[100].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    late = cohorts.exposure(101, 10**6)
    assert late[100, :-1].sum() == 0 < late[100, -1]


def test_what_is_noted_is_bounded_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.tree.lhd.MAX_NOTED", 3)
    cohorts = ExposureCounts(EDGES)
    tracemalloc.start()
    for now in range(1, 2001):
        cohorts.join(1, 0, now)
        cohorts.leave(1, 0, now)
    assert tracemalloc.get_traced_memory()[0] < 50_000
    tracemalloc.stop()
    assert not cohorts.exposure(2, 2001).any()
