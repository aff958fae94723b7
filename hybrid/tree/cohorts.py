"""How many records of each group were last used at each request, and how long they spent at which age.

Records of one group that were last used at the same request age together. What all of them spend in each bin of age
between two requests follows from sums over the few cohorts that reach a bin meanwhile, and from how many were in it
before, so that nothing is done per record while it ages.

All numbers are whole and far below what a float counts exactly: sums have the same bits in any order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

Array = np.ndarray[tuple[int, int], np.dtype[np.float64]]


MAX_NOTED = 4096
"""Records that come or go and may wait to be counted, four numbers of each."""


class Cohorts:
    """Counts of records by group and by the request of their last use.

    A record that comes or goes is only noted; many are counted at once.

    Args:
        edges: the first age of each bin, from 0 on; the last bin has no end.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        num_bins = len(edges)
        self._edges = np.array(edges)
        self._bins = np.searchsorted(self._edges, np.arange(edges[-1] + 1), "right") - 1  # by age
        self._reached = np.concatenate([[0], self._bins + 1])  # first ages that are smaller, by age
        self._full = np.tril(np.ones((num_bins, num_bins)), -1) * np.diff(self._edges, append=0)  # what is spent below
        self._span = edges[-1] + 1
        self._first = -self._span  # the request of the first row but one
        self._slack = max(64, self._span // 8)
        self._counts = np.zeros((1 + self._span + 2 * self._slack, 8), np.float32)  # by request, and group; older: 0
        self._since = 0
        self._inside = np.zeros((num_bins, 8))  # those last used before `_since`, by the bin that they were in then
        self._coming = np.zeros((num_bins + 1, 2, 8), np.float32)  # for `exposure`
        self._weights = np.zeros((2, 0), np.float32)
        self._noted = array("q")  # group, request of the last use, present request, and 1 or -1, of each
        self._spent = np.zeros((8, num_bins))  # what records spent since `_since` before they came, less after

    def join(self, group: int, last: int, now: int) -> None:
        """A record of a group, last used at request `last`, is counted from request `now` on."""
        self._noted.fromlist([group, last, now, 1])
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def leave(self, group: int, last: int, now: int) -> None:
        """A record that was counted is not counted from request `now` on."""
        self._noted.fromlist([group, last, now, -1])
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def move(self, group: int, last: int, to_group: int, to_last: int, now: int) -> None:
        """A record that was counted by one group and last use is counted by others from request `now` on."""
        self._noted.fromlist([group, last, now, -1, to_group, to_last, now, 1])
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def exposure(self, num_groups: int, until: int) -> Array:
        """Requests since the last call, up to `until`, times records, by group and bin of age, `[num_groups, bins]`. Of
        a long interval only the end counts.

        Args:
            num_groups: as many as there are.
        """
        self._settle()
        self._have(num_groups)
        self._reach(until)
        if until - self._since > self._slack:
            self._since = until - self._slack
            rows = self._since - self._first + 1 - self._edges
            reached = np.stack([self._counts[:row].sum(axis=0, dtype=np.float64) for row in rows.tolist()])
            self._inside = -np.diff(reached, axis=0, append=0)
        length = until - self._since
        if self._weights.shape[1] != length:
            self._weights = np.stack([np.ones(length), np.arange(length, 0.0, -1.0)]).astype(np.float32)
        # Those that reach the first age of a bin meanwhile: how many, and how many requests ago, added up.
        coming, counts, weights, begin = self._coming, self._counts, self._weights, self._since - self._first + 1
        for edge, into in zip(self._edges.tolist(), coming, strict=False):
            if edge >= until:
                break  # no record is as old
            np.dot(weights, counts[begin - edge : begin - edge + length], into)
        more = coming[:-1] - coming[1:]  # those that reach a bin, less those that leave it
        spent = self._inside * length
        spent += more[:, 1]
        self._inside += more[:, 0]
        exposure: Array = spent.T[:num_groups] - self._spent[:num_groups]
        self._spent[:] = 0
        self._since = until
        return exposure

    def _settle(self) -> None:
        """Count what was noted."""
        if not self._noted:
            return
        self._have(max(self._noted[::4]) + 1)
        self._reach(max(self._noted[1::4]))
        groups, last, now, number = np.frombuffer(self._noted, np.int64).reshape(-1, 4).T
        self._noted = array("q")
        (num_bins, width), number = self._inside.shape, number.astype(np.float64)
        rows = last - (self._first - 1)
        rows = np.maximum(rows, 0, out=rows)
        rows *= width
        rows += groups
        np.add.at(self._counts.reshape(-1), rows, number.astype(np.float32))
        before = self._since - last
        places = self._reached.take(before, mode="clip")
        places *= width
        places += groups
        counted = np.bincount(places, number, (num_bins + 1) * width)
        self._inside += counted[width:].reshape(num_bins, width)
        # Between two ages all of each bin in between is spent, and a part of the first and of the last.
        ages = np.concatenate([now - last, before])
        ages = np.maximum(ages, 0, out=ages)
        bins = self._bins.take(ages, mode="clip")
        ages -= self._edges.take(bins)
        bins += np.concatenate([groups, groups]) * num_bins
        number = np.concatenate([number, -number])
        size = width * num_bins
        passed = np.bincount(bins, number, size).reshape(width, num_bins)
        number *= ages
        self._spent += np.bincount(bins, number, size).reshape(width, num_bins)
        self._spent += passed.dot(self._full)

    def _have(self, num_groups: int) -> None:
        while num_groups > len(self._spent):
            self._counts, self._inside, self._coming = (
                np.concatenate([column, np.zeros_like(column)], axis=-1)
                for column in (self._counts, self._inside, self._coming)
            )
            self._spent = np.concatenate([self._spent, np.zeros_like(self._spent)])

    def _reach(self, last: int) -> None:
        """Have a row for a request; what is then older than the rows has reached the last bin."""
        counts = self._counts
        if last - self._first + 1 < len(counts):
            return
        passed = last - self._span - self._slack - self._first
        counts[0] = counts[: passed + 1].sum(axis=0, dtype=np.float64)
        kept = counts[passed + 1 :].copy()
        counts[1 : len(kept) + 1] = kept
        counts[len(kept) + 1 :] = 0
        self._first += passed
