"""How many records of each group were last used at each request, and how long they spent at which age.

Records of one group that were last used at the same request age together. What all of them spend in each bin of age
between two requests follows from sums over the few cohorts that reach a bin meanwhile, and from how many had reached it
before, so that nothing is done per record while it ages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray[tuple[int, int], np.dtype[np.float64]]


MAX_NOTED = 4096
"""Records that come or go and may wait to be counted, four numbers of each."""


class Cohorts:
    """Counts of records by group and by the request of their last use.

    A record that comes or goes is only noted; many are counted at once.

    Args:
        edges: the first age of each bin; the last bin has no end.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = np.array(edges)
        self._widths = np.diff(self._edges)  # of all bins but the last
        self._span = edges[-1] + 1
        self._first = -self._span  # the request of the first row
        self._slack = max(64, self._span // 8)
        self._counts = np.zeros((self._span + 2 * self._slack, 8), np.int32)  # by request of the last use, and group
        self._older = np.zeros(8, np.int32)  # those last used before the first row
        self._since = 0
        self._aged = np.zeros(
            (len(edges), 8), np.int32
        )  # those that had reached a bin before `_since`, by bin and group
        self._noted: list[int] = []  # group, request of the last use, present request, and 1 or -1, of each
        self._spent = np.zeros((8, len(edges)))  # what records spent since `_since` before they came, less after

    def join(self, group: int, last: int, now: int) -> None:
        """A record of a group, last used at request `last`, is counted from request `now` on."""
        self._noted.extend((group, last, now, 1))
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def leave(self, group: int, last: int, now: int) -> None:
        """A record that was counted is not counted from request `now` on."""
        self._noted.extend((group, last, now, -1))
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def move(self, group: int, last: int, to_group: int, to_last: int, now: int) -> None:
        """A record that was counted by one group and last use is counted by others from request `now` on."""
        self._noted.extend((group, last, now, -1, to_group, to_last, now, 1))
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
            for at, edge in enumerate(self._edges):
                self._aged[at] = self._older + self._counts[: self._since - edge - self._first].sum(axis=0)
        length = until - self._since
        # Those that reach the first age of a bin meanwhile: how many, and how many requests ago, added up.
        weights = np.stack([np.ones(length), np.arange(length, 0.0, -1.0)])
        reached = np.zeros((len(self._edges), 2, num_groups))
        for at, edge in enumerate(self._edges.tolist()):
            if edge >= until:
                break  # no record is as old
            row = self._since - edge - self._first
            np.dot(weights, self._counts[row : row + length, :num_groups].astype(np.float64), out=reached[at])
        aged = self._aged[:, :num_groups]
        beyond = length * aged + reached[:, 1]
        beyond[:-1] -= beyond[1:]
        aged += reached[:, 0].astype(np.int32)
        exposure: Array = beyond.T - self._spent[:num_groups]
        self._spent[:] = 0
        self._since = until
        return exposure

    def _settle(self) -> None:
        """Count what was noted."""
        if not self._noted:
            return
        groups, last, now, number = np.array(self._noted).reshape(-1, 4).T.copy()
        self._noted = []
        self._have(int(groups.max()) + 1)
        self._reach(int(last.max()))
        row = last - self._first
        older = row < 0
        np.add.at(self._older, groups[older], number[older].astype(np.int32))
        width = len(self._older)
        places = (row * width + groups)[~older]
        np.add.at(self._counts.reshape(-1), places, number[~older].astype(np.int32))
        num_bins = len(self._edges)
        reached = np.zeros((num_bins + 1, width), np.int32)  # by how many bins
        before = self._since - last
        places = np.searchsorted(self._edges, before) * width + groups
        np.add.at(reached.reshape(-1), places, number.astype(np.int32))
        self._aged += reached[:0:-1].cumsum(axis=0, dtype=np.int32)[::-1]
        # Between two ages all of each bin in between is spent, and a part of the first and of the last.
        ages = np.maximum(np.concatenate([now - last, before]), 0)
        bins = np.searchsorted(self._edges, ages, "right") - 1
        places, weights = np.concatenate([groups, groups]) * num_bins + bins, np.concatenate([number, -number])
        size, shape = self._spent.size, self._spent.shape
        self._spent += np.bincount(places, weights * (ages - self._edges[bins]), size).reshape(shape)
        beyond = np.bincount(places, weights, size).reshape(shape)
        self._spent[:, :-1] += beyond[:, :0:-1].cumsum(axis=1)[:, ::-1] * self._widths

    def _have(self, num_groups: int) -> None:
        while num_groups > len(self._older):
            self._counts, self._older, self._aged = (
                np.concatenate([column, np.zeros_like(column)], axis=-1)
                for column in (self._counts, self._older, self._aged)
            )
            self._spent = np.concatenate([self._spent, np.zeros_like(self._spent)])

    def _reach(self, last: int) -> None:
        """Have a row for a request; what is then older than the rows has reached the last bin."""
        counts = self._counts
        if last - self._first < len(counts):
            return
        passed = last - self._span - self._slack - self._first
        self._older += counts[:passed].sum(axis=0, dtype=np.int32)
        kept = counts[passed:].copy()
        counts[: len(kept)] = kept
        counts[len(kept) :] = 0
        self._first += passed
