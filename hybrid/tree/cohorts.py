"""How many records of each group were last used at each request, and how long they spent at which age.

Records of one group that were last used at the same request age together. What all of them spend in each bin of age
between two requests follows from sums over these cohorts, so that nothing is done per record while it ages.
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
        self._widths = np.array([*np.diff(edges), 1 << 40])
        self._span = edges[-1] + 1
        self._first = 0  # the request of the first column
        self._slack = max(64, self._span // 8)
        self._counts = np.zeros((8, self._span + 2 * self._slack), np.int16)
        self._older = np.zeros(8, np.int32)  # those last used before the first column
        self._since = 0
        self._noted: list[int] = []  # group, request of the last use, present request, and 1 or -1
        self._spent = np.zeros((8, len(edges)))  # what records spent since `_since` before they came, less after

    def join(self, group: int, last: int, now: int) -> None:
        """A record of a group, last used at request `last`, is counted from request `now` on."""
        self._noted += (group, last, now, 1)
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def leave(self, group: int, last: int, now: int) -> None:
        """A record that was counted is not counted from request `now` on."""
        self._noted += (group, last, now, -1)
        if len(self._noted) > 4 * MAX_NOTED:
            self._settle()

    def exposure(self, num_groups: int, until: int) -> Array:
        """Requests since the last call, up to `until`, times records, by group and bin of age, `[num_groups, bins]`. Of
        a long interval only the end counts."""
        self._settle()
        self._have(num_groups)
        self._reach(until)
        since = max(self._since, until - self._slack)
        start = max(0, since - self._span - self._first)
        end = until - self._first
        # Two sums in a row: how many were last used before a request, added up over the requests. Differences of them
        # are right even where the sums wrap around.
        sums = np.zeros((num_groups, end - start + 1), np.int32)
        sums[:, 0] = self._older[:num_groups] + self._counts[:num_groups, :start].sum(axis=1, dtype=np.int32)
        sums[:, 1:] = self._counts[:num_groups, start:end]
        np.cumsum(sums, axis=1, out=sums)
        np.cumsum(sums, axis=1, out=sums)
        entered = self._first + start + self._edges
        before, after = np.maximum(since - entered, 0), np.maximum(until - entered, 0)
        exposure: Array = (sums[:, after] - sums[:, before]).astype(np.float64)
        exposure[:, :-1] -= exposure[:, 1:]
        exposure -= self._spent[:num_groups]
        self._spent[:] = 0
        self._since = until
        return exposure

    def _settle(self) -> None:
        """Count what was noted."""
        if not self._noted:
            return
        groups, last, now, number = np.array(self._noted).reshape(-1, 4).T
        self._noted.clear()
        self._have(int(groups.max()) + 1)
        self._reach(int(last.max()))
        column = last - self._first
        older = column < 0
        np.add.at(self._older, groups[older], number[older].astype(np.int32))
        places = (groups * self._counts.shape[1] + column)[~older]
        np.add.at(self._counts.reshape(-1), places, number[~older].astype(np.int16))
        late = now > np.maximum(self._since, last)  # the others have spent nothing since the last call
        groups, last, now, number = groups[late], last[late], now[late], number[late]
        before = np.clip(np.maximum(self._since - last, 0)[:, None] - self._edges, 0, self._widths)
        spent = np.clip((now - last)[:, None] - self._edges, 0, self._widths) - before
        num_bins = len(self._edges)
        bins = groups[:, None] * num_bins + np.arange(num_bins)
        sums = np.bincount(bins.reshape(-1), (spent * number[:, None]).reshape(-1), self._spent.size)
        self._spent += sums.reshape(self._spent.shape)

    def _have(self, num_groups: int) -> None:
        while num_groups > len(self._older):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._older = np.concatenate([self._older, np.zeros_like(self._older)])
            self._spent = np.concatenate([self._spent, np.zeros_like(self._spent)])

    def _reach(self, last: int) -> None:
        """Have a column for a request; what is then older than the columns has reached the last bin."""
        counts, width = self._counts, self._counts.shape[1]
        if last - self._first < width:
            return
        passed = last - self._span - self._slack - self._first
        self._older += counts[:, :passed].sum(axis=1, dtype=np.int32)
        kept = counts[:, passed:].copy()
        counts[:, : kept.shape[1]] = kept
        counts[:, kept.shape[1] :] = 0
        self._first += passed
