"""From counts of hits and exposure to the densities of `hybrid.tree.lhd`, by class and age.

The classes are a hierarchy: each has a coarser one as its parent, from which it begins and which it corrects. Tables
have a row for each class, in the order in which they came, and a column for each bin of age.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2

import numpy as np

from hybrid.tree.cohorts import Array

BINS = 27
"""Half octaves of age + 1: the last begins at about 8000 requests."""

DISCOUNT = 0.01
"""Per request: what happens more than about a hundred requests from now counts little."""

PRIOR = 2.0
"""Hits with which what is expected, from coarser classes and wider windows of age, speaks against what is observed."""

WINDOWS = (BINS, 3, 1, 0)
"""Bins on both sides of an age whose hits count as one observation, in turn."""


def first_ages() -> list[int]:
    """The first age of each bin, and of the one after the last. An empty bin has the first age of the next."""
    edges = []
    for wanted in range(BINS + 1):
        age = int(2 ** (wanted / 2)) - 1
        while int(2 * log2(age + 1) + 1e-9) < wanted:
            age += 1
        edges.append(age)
    return edges


EDGES = first_ages()
BIN_OF = [place for place, (first, end) in enumerate(pairwise(EDGES)) for _ in range(first, end)] + [BINS - 1]
LAST_AGE = len(BIN_OF) - 1

_WIDTHS = np.array([*np.diff(EDGES[:BINS]), 100_000])[:, None]
_FIRST_HAZARDS = 1 / (np.array([(first + max(first, end - 1)) / 2 for first, end in pairwise(EDGES)]) + 10)
_PRIOR, _DISCOUNT, _ONE = np.array(PRIOR), np.array(DISCOUNT), np.array(1.0)  # faster operands than numbers are

_NEVER = np.array(-100.0)
"""The logarithm of a chance that changes no sum; smaller ones are slow to compute."""


class Hierarchy:
    """Classes by their distance from the coarsest ones, which have no parent and no hits of their own.

    Args:
        parents: the row of each class's parent. The first `num_roots` are their own.
        levels: the rows of the classes of each level, the coarsest first. A level's parents are in the one before it.
        num_roots: classes whose hazard is the one that all begin with.
    """

    def __init__(self, parents: list[int], levels: list[list[int]], num_roots: int) -> None:
        self._order = np.array([*range(num_roots), *(row for level in levels for row in level)])
        place = np.empty(len(parents), np.int64)  # of each row in the order of levels
        place[self._order] = np.arange(len(parents))
        above = place[np.array(parents)[self._order]]
        ends = np.cumsum([num_roots, *map(len, levels)]).tolist()
        self._num_roots = num_roots
        self._levels = [(slice(*level), above[slice(*level)]) for level in pairwise(ends) if level[0] < level[1]]
        # Where the counts of each level but the coarsest are added: of hits, and of exposure in a second table.
        cells = [rows[:, None] * BINS + np.arange(BINS) for _, rows in self._levels]
        self._cells = [np.stack([of_hits, of_hits + len(parents) * BINS]).reshape(-1) for of_hits in cells]

    def densities(self, counts: np.ndarray) -> Array:
        """The densities of all classes, `[classes, bins]`.

        Args:
            counts: hits and exposure of each class, without those of finer ones, `[2, classes, bins]`.
        """
        counts = counts.take(self._order, axis=1)
        for (rows, _), cells in zip(self._levels[:0:-1], self._cells[:0:-1], strict=True):
            np.add.at(counts.reshape(-1), cells, counts[:, rows].reshape(-1))
        hits, exposure = counts
        observed = [window(hits, reach) + _PRIOR for reach in WINDOWS]
        hazards = np.empty_like(hits)
        hazards[: self._num_roots] = _FIRST_HAZARDS
        for rows, above in self._levels:
            hazards[rows] = refined(hazards[above], [found[rows] for found in observed], exposure[rows])
        found: Array = np.empty_like(hits)
        found[self._order] = density(hazards)
        return found


def refined(hazards: Array, observed: list[Array], exposure: Array) -> Array:
    """Expected hazards, corrected by what was observed: the hits in each of the windows and those of the prior, and the
    exposure, `[classes, bins]`.

    The hits that were observed over those expected are a factor, for all ages first, then for windows of them that get
    narrower: as far as there are hits to tell, each age gets a hazard of its own, and otherwise the shape stays.
    """
    for reach, hits in zip(WINDOWS, observed, strict=True):
        expected = window(exposure * hazards, reach)
        expected += _PRIOR
        hazards = hazards * hits
        hazards /= expected
    return hazards


def window(values: Array, reach: int) -> Array:
    """Sums of each bin and of as many on both sides."""
    if reach == 0:
        return values
    if reach >= BINS:
        total: Array = np.add.reduce(values, axis=1, keepdims=True)
        return total
    sums = np.zeros((len(values), BINS + 2 * reach + 1))
    sums[:, reach + 1 : reach + 1 + BINS] = values
    np.add.accumulate(sums, axis=1, out=sums)
    within: Array = sums[:, 2 * reach + 1 :] - sums[:, : -2 * reach - 1]
    return within


def density(hazards: Array) -> Array:
    """Discounted hits to come over discounted time until then, from each age bin on, `[classes, bins]`.

    Within a bin the hazard is constant, so that both integrals have a closed form; one pass from the last bin back.
    """
    by_bin = hazards.T.copy()
    num_classes = by_bin.shape[1]
    rates = by_bin + _DISCOUNT
    stays = np.exp(np.maximum(-rates * _WIDTHS, _NEVER))
    spent = (_ONE - stays) / rates
    ahead = np.concatenate([spent * by_bin, spent], axis=1)  # hits and time, of each bin alone at first
    bins, stays = [*ahead], [*np.concatenate([stays, stays], axis=1)]
    more = np.empty_like(bins[0])
    for (own, later), stay in zip(pairwise(bins[::-1]), stays[-2::-1], strict=True):
        np.multiply(stay, own, more)
        np.add(later, more, later)
    return np.ascontiguousarray((ahead[:, :num_classes] / ahead[:, num_classes:]).T)
