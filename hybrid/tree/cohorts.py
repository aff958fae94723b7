"""How many records of each group were last used at each request, and how long they spent at which age.

Records of one group that were last used at the same request age together. What all of them spend in each bin of age
between two requests follows from sums over these cohorts, so that nothing is done per record while it ages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Cohorts:
    """Counts of records by group and by the request of their last use.

    Args:
        edges: the first age of each bin; the last bin has no end.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = np.array(edges)
        self._span = edges[-1] + 1
        self._first = 0  # the request of the first column
        self._slack = max(64, self._span // 8)
        self._counts = np.zeros((8, self._span + 2 * self._slack), np.int16)
        self._older = np.zeros(8, np.int32)  # those last used before the first column

    def add(self, group: int, last: int, number: int) -> None:
        """Add records of a group that were last used at a request; a negative number removes them."""
        self._have(group + 1)
        if last < self._first:
            self._older[group] += number
        else:
            self._reach(last)
            self._counts[group, last - self._first] += number

    def exposure(self, num_groups: int, since: int, until: int) -> Array:
        """Requests of `[since, until)` times records, by group and bin of age, `[num_groups, bins]`. Of a long interval
        only the end counts."""
        self._have(num_groups)
        self._reach(until)
        since = max(since, until - self._slack)
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
        return exposure

    def _have(self, num_groups: int) -> None:
        while num_groups > len(self._older):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._older = np.concatenate([self._older, np.zeros_like(self._older)])

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
