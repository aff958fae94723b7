"""Exposure, counted for all records at once, against counting each at each request."""

import random

import numpy as np
import pytest

from hybrid.tree.lhd import BIN_OF, BINS, EDGES, LAST_AGE, NOWHERE, CheckpointRecord, Exposure
from hybrid.tree.node import NodeUsage
from hybrid.tree.policy import Facts


def record_of(group: int, last: int) -> CheckpointRecord:
    record = CheckpointRecord(Facts.without_node(NodeUsage(1, 1, used_at=last), last, 64))
    record.group = group
    return record


def one_by_one(records: list[CheckpointRecord], num_groups: int, now: int) -> np.ndarray:
    """Every record, at one request, in the bin of its age."""
    exposure = np.zeros((num_groups, BINS))
    for record in records:
        if now >= record.last:
            exposure[record.group, BIN_OF[min(now - record.last, LAST_AGE)]] += 1
    return exposure


@pytest.mark.parametrize("seed", range(5))
def test_records_are_counted_as_one_by_one(seed: int) -> None:
    """They come, move and go at any request, even before the last use that they have."""
    dice, exposure, now = random.Random(seed), Exposure(), 0
    records: list[CheckpointRecord] = []
    while now < 600:
        expected = np.zeros((20, BINS))
        for _ in range(dice.choice((1, 5, 19, 100))):
            for _ in range(dice.choice((0, 0, 1, 2))):
                records.append(record_of(dice.randrange(20), dice.randrange(max(0, now - 60), now + 3)))
                exposure.join(records[-1], now)
            if records and dice.random() < 0.4:
                exposure.move(dice.choice(records), dice.randrange(20), dice.randrange(max(0, now - 60), now + 3), now)
            if records and dice.random() < 0.4:
                gone = records.pop(dice.randrange(len(records)))
                exposure.leave(gone, now)
                assert gone.place == NOWHERE
            expected += one_by_one(records, 20, now)
            now += 1
        assert (exposure.count(20, now) == expected).all()
        assert len(exposure) == len(records)


def test_a_long_pause_counts_in_the_last_bin() -> None:
    exposure = Exposure()
    exposure.join(record_of(3, 5), 5)
    late = exposure.count(4, 10**6)
    assert late[3].sum() == 10**6 - 5
    assert late[3, -1] == 10**6 - 5 - EDGES[BINS - 1]
    assert not exposure.count(4, 10**6).any()
