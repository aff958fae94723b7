"""From counts of hits and exposure to densities."""

from itertools import pairwise

import numpy as np
import pytest

from hybrid.tree.density import density, density_of_hint
from hybrid.tree.lhd import BIN_OF, BINS, EDGES, LAST_AGE, PRIOR, WINDOWS, Hierarchy

WIDTHS = np.array([*(end - first for first, end in pairwise(EDGES[:BINS])), 100_000])


def test_bins_of_age_are_half_octaves_without_a_gap() -> None:
    assert [BIN_OF[age] for age in (0, 1, 2, 3, 4, 5, 7, 15, LAST_AGE)] == [0, 2, 3, 4, 4, 5, 6, 8, BINS - 1]
    for at in range(BINS - 1):
        assert EDGES[at] <= EDGES[at + 1]
        for age in range(EDGES[at], min(EDGES[at + 1], EDGES[at] + 50)):
            assert BIN_OF[age] == at


@pytest.mark.parametrize("hazard", [0.5, 0.01, 1e-4])
def test_where_the_hazard_is_constant_it_is_the_density(hazard: float) -> None:
    """A hit comes after 1 / hazard requests on average, which is what it costs to wait for it."""
    assert density(np.full((1, BINS), hazard), WIDTHS)[0] == pytest.approx([hazard] * BINS)


def test_what_comes_soon_counts_more_than_what_comes_late() -> None:
    hazards = [[0.1 if at < 6 else 1e-4 for at in range(BINS)], [1e-4 if at < 16 else 0.1 for at in range(BINS)]]
    soon, late = density(np.array(hazards), WIDTHS)
    assert soon[0] > 5 * late[0]
    assert late[10] > late[0]  # the longer it has waited, the nearer it is
    assert soon[10] < soon[0]


def test_a_hit_that_is_certain_is_one_whose_hazard_is_as_high_as_can_be_when_its_time_has_come() -> None:
    """And a unit of time is whatever the discount is for."""
    hazards = np.full((1, BINS), 1e-9)
    hazards[0, 12:] = 50.0
    assert density(hazards, WIDTHS)[0, 0] == pytest.approx(density_of_hint(EDGES[12]), rel=0.02)
    assert density(hazards / 7, 7 * WIDTHS, 0.01 / 7)[0] * 7 == pytest.approx(density(hazards, WIDTHS)[0])
    assert density_of_hint(-50) == density_of_hint(100) < density_of_hint(1) == density_of_hint(0)


def by_hand(row: int, parents: list[int], counts: np.ndarray) -> list[float]:
    """The hazards of a class, one age after the other."""
    if parents[row] == row:
        return [1 / ((EDGES[at] + max(EDGES[at], EDGES[at + 1] - 1)) / 2 + 10) for at in range(BINS)]
    of_class = {row}
    while more := {child for child, parent in enumerate(parents) if parent in of_class} - of_class:
        of_class |= more
    hits, exposure = counts[:, sorted(of_class)].sum(axis=1)
    hazards = by_hand(parents[row], parents, counts)
    for reach in WINDOWS:
        near = [slice(max(0, at - reach), at + reach + 1) for at in range(BINS)]
        expected = [sum(exposure[bins] * hazards[bins]) for bins in near]
        hazards = [hazards[at] * (sum(hits[near[at]]) + PRIOR) / (expected[at] + PRIOR) for at in range(BINS)]
    return hazards


def test_each_class_corrects_the_coarser_one_by_its_own_hits_and_those_of_finer_ones() -> None:
    """
    0     1
    ├── 3 ── 2, 6
    └── 4 ── 5            classes come in any order, but for their parents
    """
    parents, levels = [0, 1, 3, 0, 0, 4, 3], [[3, 4], [2, 5, 6]]
    rng = np.random.default_rng(0)
    counts = np.stack([rng.integers(0, 9, (len(parents), BINS)), rng.integers(0, 4000, (len(parents), BINS))]) * 1.0
    counts[:, :2] = 0
    before = counts.copy()
    found = Hierarchy(parents, levels, num_roots=2).densities(counts)
    expected = density(np.array([by_hand(row, parents, counts) for row in range(len(parents))]), WIDTHS)
    assert found == pytest.approx(expected)
    assert (counts == before).all()
