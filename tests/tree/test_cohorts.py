"""Exposure by cohorts, against counting each record at each request."""

import random

import numpy as np
import pytest

from hybrid.tree.cohorts import Cohorts

EDGES = [0, 1, 2, 2, 4, 9, 20, 40]


def one_by_one(records: list[tuple[int, int]], num_groups: int, since: int, until: int) -> np.ndarray:
    """Every record at every request, in the last bin whose first age it has reached."""
    exposure = np.zeros((num_groups, len(EDGES)))
    for group, last in records:
        for now in range(max(since, last), until):
            exposure[group, max(at for at, edge in enumerate(EDGES) if edge <= now - last)] += 1
    return exposure


@pytest.mark.parametrize("seed", range(5))
def test_cohorts_count_what_records_one_by_one_would(seed: int) -> None:
    """Over so many requests that the columns are used again several times."""
    dice, cohorts, records, now = random.Random(seed), Cohorts(EDGES), [], 0
    while now < 600:
        since, now = now, now + dice.randrange(1, 19)
        for _ in range(dice.randrange(12)):
            record = (dice.randrange(20), dice.randrange(max(0, now - 60), now))
            records.append(record)
            cohorts.add(*record, 1)
        for _ in range(dice.randrange(9)):
            if records:
                cohorts.add(*records.pop(dice.randrange(len(records))), -1)
        assert cohorts.exposure(20, since, now) == pytest.approx(one_by_one(records, 20, since, now))


def test_a_group_not_seen_yet_and_a_long_pause_are_no_error() -> None:
    cohorts = Cohorts(EDGES)
    cohorts.add(100, 5, 3)
    assert cohorts.exposure(101, 5, 7)[100].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    late = cohorts.exposure(101, 7, 10**6)
    assert late[100, :-1].sum() == 0 < late[100, -1]
