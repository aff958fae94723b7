"""The rhythm of paths: when is a conversation continued?

What is at the end of a path is worth keeping until its next request, and that comes sooner or later depending on who
sends it: an agent that calls tools within seconds, a person when the answer is read. A path is what one request left.
Its class is the time between its request and the one before on the same path, and the length of its answer. For each
class and age, in seconds, are counted the continuations and how long paths had that age; from their ratio follows the
density of hits to come, in the unit of `hybrid.tree.lhd`: per request, at the mean rate of requests.
"""

from __future__ import annotations

import numpy as np

from hybrid.tree.density import DISCOUNT, density
from hybrid.tree.node import Kind

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

ENDS = Kind.TURN_END, Kind.PROMPT_END
"""Kinds of checkpoints that a conversation continues from."""

GAPS = np.array([10.0, 30.0, 90.0, 300.0])
"""Seconds between the last two requests of a path that divide its classes; where there is one only is a class."""

ANSWERS = np.array([100, 300, 1000])
"""Tokens of an answer that divide the classes."""

NUM_CLASSES = (len(GAPS) + 2) * (len(ANSWERS) + 1)

BINS = 40
"""Half octaves of age, the first up to a second."""

REFIT, FADING = 25, 0.99
"""Requests after which the densities are made anew, and the counts fade by that factor."""

RATE_FADING = 0.998
"""Of what the mean rate of requests is taken from, with each request."""

PRIOR = 2.0
"""Continuations with which what is expected speaks against what is observed."""

MAX_OPEN = 2048
"""Paths that are watched until they are continued; of more, the oldest is not watched any more."""

MAX_TIMES = 1 << 15
"""Requests whose times are remembered: what was used before them is as old as the first."""

_FIRST = np.array([0.0, *(2.0 ** (np.arange(BINS - 1) / 2))])
_WIDTHS = 2.0 ** (np.arange(BINS) / 2) - _FIRST
_FIRST_HAZARDS = 1 / (_FIRST + _WIDTHS / 2 + 30)


class Path:
    """What one request left.

    Attributes:
        seconds: when the request came.
        group: the number of its class.
        place: among those that are watched; None: it is not.
    """

    __slots__ = ("group", "place", "seconds")

    def __init__(self, seconds: float, group: int) -> None:
        self.seconds: float = seconds
        self.group: int = group
        self.place: int | None = None


class PathRhythm:
    """When paths are continued, as learned from those that were.

    Attributes:
        shortest: length from which on what is at the end of a path is ranked by it: where paths have anchors, and are
            evicted piece by piece. 0: never.
        is_known: there are densities.
        counts: continuations, and seconds, by class and bin of age, `[2, classes, bins]`; they fade.
    """

    def __init__(self) -> None:
        self.shortest: int = 0
        self.is_known: bool = False
        self._times = np.zeros(MAX_TIMES)  # of requests, by their number
        self._now = 0
        self._requests = self._seconds = 0.0  # whose ratio is the rate
        self.counts: np.ndarray = np.zeros((2, NUM_CLASSES, BINS))
        self._open: list[Path | None] = [None] * MAX_OPEN
        self._next = 0
        self._begun = np.zeros(MAX_OPEN)
        self._counted = np.full(MAX_OPEN, np.inf)  # the age up to which each is counted; inf: there is none
        self._groups = np.zeros(MAX_OPEN, np.int64)
        self._densities = np.ones((NUM_CLASSES, BINS))

    @property
    def now(self) -> float:
        """Seconds at which the last request came."""
        return self._times.item(self._now % MAX_TIMES)

    def requested(self, now: int, seconds: float) -> None:
        """A request comes, the one of this number."""
        before, self._now = self._now, now
        if before:
            self._requests = self._requests * RATE_FADING + now - before
            self._seconds = self._seconds * RATE_FADING + max(0.0, seconds - self._times.item(before % MAX_TIMES))
        self._times[now % MAX_TIMES] = seconds
        if now % REFIT == 0 and self._seconds > 0:
            self._fit()

    def began(self, before: Path | None) -> Path:
        """The path of the request that has come, which continues one or none."""
        if before is None:
            return Path(self.now, len(GAPS) + 1)
        gap = self.now - before.seconds
        if before.place is not None:
            self._count(np.array([before.place]))
            self.counts[0, before.group, bins_of(np.array([gap]))] += 1
            self._forget(before)
        return Path(self.now, int(np.searchsorted(GAPS, gap, "right")))

    def ended(self, path: Path, num_answered: int) -> None:
        """A request has ended, with an answer of `num_answered` tokens: watch until its path is continued."""
        if path.place is not None:
            return
        path.group = path.group * (len(ANSWERS) + 1) + int(np.searchsorted(ANSWERS, num_answered, "right"))
        place, self._next = self._next, (self._next + 1) % MAX_OPEN
        if (oldest := self._open[place]) is not None:
            self._forget(oldest)
        self._open[place], path.place = path, place
        self._begun[place], self._counted[place], self._groups[place] = path.seconds, 0.0, path.group

    def densities(self, groups: Ints, ages: Ints) -> Floats:
        """Hits to come per request, of classes at ages in requests, each `[paths]`."""
        used = np.maximum(self._now - ages, self._now - MAX_TIMES + 1) % MAX_TIMES
        found: Floats = self._densities[groups, bins_of(self.now - self._times[used])]
        return found

    def _forget(self, path: Path) -> None:
        place, path.place = path.place, None
        assert place is not None
        self._open[place], self._counted[place] = None, np.inf

    def _count(self, places: Ints) -> None:
        """Count the seconds of those that are watched, from the age up to which they are counted."""
        ages = self.now - self._begun[places]
        spent = np.minimum(ages[:, None], _FIRST + _WIDTHS) - np.maximum(self._counted[places][:, None], _FIRST)
        np.add.at(self.counts[1], self._groups[places], np.maximum(spent, 0.0, out=spent))
        self._counted[places] = np.maximum(self._counted[places], ages)

    def _fit(self) -> None:
        """Make the densities anew."""
        self._count(np.flatnonzero(self._counted < np.inf))
        hits, spent = smoothed(self.counts)
        expected = (hits.sum(axis=0) + PRIOR) / (spent.sum(axis=0) + PRIOR / _FIRST_HAZARDS)
        hazards = (hits + PRIOR) / (spent + PRIOR / expected)
        rate = self._requests / self._seconds
        self._densities = density(hazards, _WIDTHS, DISCOUNT * rate) / rate
        self.counts *= FADING
        self.is_known = True


def bins_of(ages: Floats) -> Ints:
    """The bins of ages in seconds."""
    found: Ints = np.clip((2 * np.log2(np.maximum(ages, 0.5))).astype(np.int64) + 1, 0, BINS - 1)
    return np.where(ages < 1, 0, found)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Bins, with half of each neighbour."""
    found = values.copy()
    found[..., 1:] += values[..., :-1] / 2
    found[..., :-1] += values[..., 1:] / 2
    return found
