"""Learned hit density: the default policy.

What a checkpoint is worth is the number of hits to come for the room and the time that it takes. Both are learned from
what happens, for classes of checkpoints: why it was put there, whether it has descendants, how often it was
hit, how many turns lie before it, how near it is to the end of the context. Time counts requests.

* For each class and age (in half octaves) are counted the hits and the *exposure*: the requests that came while
  checkpoints of that class had that age. Their ratio is the hazard of a hit.
* A checkpoint that was evicted, or not admitted, is still watched: its exposure counts, and so do the hits that it
  would have had (`missed`). What is learned is therefore how prefixes are reused, not what this cache happened to keep,
  and a class that is always evicted can come back.
* A class begins with the hazard of the coarser one, down to 1 / (age + 10), and corrects it as far as its own hits can
  tell: first for all ages together, then for windows of age that get narrower.
* From the hazard follows, for every age, the density: discounted hits to come, over discounted time until then.
* `rank` is density times tokens saved per byte freed.
* What is at the end of a long path has the density of its path instead, where times are known (`hybrid.tree.paths`).

It descends from LHD (Beckmann et al., NSDI 2018); hazards with censored data, ghosts and discounting are what differs.
`bench/hit_rate.py` measures it.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import pairwise
from math import log2

import numpy as np

from hybrid.tree.density import Array, density, density_of_hint
from hybrid.tree.node import Kind
from hybrid.tree.paths import ENDS, PathRhythm
from hybrid.tree.policy import AgingPolicy, Facts, Floats, Ints

EXACT_HITS = 3
"""Numbers of hits up to this one are distinguished exactly; larger ones in half octaves."""

FADING, REFIT = 0.9, 50
"""Counts fade by this factor each time the tables are rebuilt."""

MAX_WATCHED = 20_000
"""Checkpoints that have gone and are still watched; beyond this many the one that went first is forgotten."""

NEAR_THE_END = 4
"""Octaves of what is left of the context, from a quarter of it on. The context is taken to be the longest prompt seen,
rounded up to a power of two."""

Class = tuple[object, ...]
"""(kind, has_below, hits up to EXACT_HITS, octave of turns or of more hits, nearness of the end), and its prefixes."""

CLASS_SIZES = (2, 3, 4, 5)
"""Lengths of the prefixes that are classes."""

ANY, SPARE = 0, 1
"""The groups that are not classes: all checkpoints; those that are spare and not used yet."""

FINE_TURNS = [min(3, (turn + 1).bit_length() - 1) for turn in range(8)]
"""Octaves of turns: 0, 1 to 2, 3 to 6, 7 and more."""

FINE_HITS = [max(0, min(7, int(2 * log2((hits + 1) / (EXACT_HITS + 1))))) for hits in range(46)]
"""Half octaves of hits from `EXACT_HITS` on; 45 and more."""

PATHS = 1 << 32
"""The groups from here on are classes of paths."""

BINS = 27
"""Half octaves of age + 1: the last begins at about 8000 requests."""

PRIOR = 2.0
"""Hits with which what is expected, from coarser classes and wider windows of age, speaks against what is observed."""

WINDOWS = (BINS, 3, 1, 0)
"""Bins on both sides of an age whose hits count as one observation, in turn."""

NOWHERE = -1
"""The place of a record that is not watched."""


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

_BIN_OF, _EDGES = np.array(BIN_OF), np.array(EDGES[:BINS])
_WIDTHS = np.array([*np.diff(EDGES[:BINS]), 100_000])
_AGES = np.array([(first + max(first, end - 1)) / 2 for first, end in pairwise(EDGES)])
_FIRST_HAZARDS = 1 / (_AGES + 10)


class CheckpointRecord:
    """A checkpoint as it is learned from, there or gone.

    Attributes:
        num_tokens: length of its prefix.
        last: request at which it was last put there or used.
        live: it is in the cache.
        group: the number of its class.
        place: among those that are watched, or `NOWHERE`.
    """

    __slots__ = ("below", "group", "hits", "kind", "last", "live", "num_tokens", "place", "turn")

    def __init__(self, facts: Facts) -> None:
        self.kind: Kind = facts.kind
        self.turn: int = facts.turn
        self.hits: int = facts.hits
        self.num_tokens: int = facts.num_tokens
        self.below: bool = facts.has_below
        self.last: int = facts.now - facts.age
        self.live: bool = True
        self.group: int = ANY
        self.place: int = NOWHERE

    def classify(self, context: int) -> Class:
        """Its class, where prompts have up to `context` tokens."""
        hits, turn = self.hits, self.turn
        if hits < EXACT_HITS:
            fine = FINE_TURNS[turn if turn < len(FINE_TURNS) else -1]
        else:
            fine = FINE_HITS[hits if hits < len(FINE_HITS) else -1]
            hits = EXACT_HITS
        near = 0  # a conversation ends at the latest where its next prompt does not fit into the context
        if self.num_tokens > 0.75 * context and self.kind in ENDS:
            left = (context - self.num_tokens) / context
            near = min(NEAR_THE_END, int(-log2(left)) - 1) if left > 0 else NEAR_THE_END
        return (self.kind, self.below, hits, fine, near)


class LearnedHitDensity(AgingPolicy):
    """Evict the fewest expected hits per byte, as learned from past hits.

    Args:
        guarded: 1: while LRU would have had more hits lately, it takes over. 0: it does not.
    """

    def __init__(self, guarded: int = 1) -> None:
        self.guarded = guarded > 0
        self.rhythm = PathRhythm()
        self._now = 0
        self._fitted_at = 0
        self._context = 1
        self._gone: deque[CheckpointRecord] = deque()
        self._exposure = Exposure()
        self._groups: dict[Class, int] = {(): ANY, ("spare",): SPARE}
        self._parents = [ANY, ANY]
        self._levels: list[list[int]] = [[] for _ in CLASS_SIZES]
        self._hierarchy: Hierarchy | None = None  # of the classes that there are; None: one has come
        self._counts = np.zeros((2, 2, BINS))  # hits and exposure
        self._noted: list[int] = []  # hits since the last fit, by their place in the table
        self._table = np.ones(2 * BINS)  # densities by class and bin of age
        self._expected: dict[int, Floats] = {}  # by where they begin in it, those of what is expected
        self._fit()

    @property
    def num_watched(self) -> int:
        """Number of checkpoints, stored or not, whose use is being counted."""
        return len(self._exposure)

    def weigh(self, facts: Facts) -> tuple[int, float]:
        """Return where the densities of its class begin in their table, and what they count for."""
        if facts.last_used == 0:  # spare and not used yet: evicted before all others, the least useful first
            return SPARE * BINS, -1.0 / (1 + facts.tokens_saved)
        path, rhythm = facts.path, self.rhythm
        is_long = 0 < rhythm.shortest <= facts.num_tokens
        if path is not None and rhythm.is_known and is_long and not (facts.has_below or facts.expected_in):
            if facts.notes is None:
                self._record(facts)
            return PATHS + path.group, facts.tokens_saved / facts.bytes_freed * facts.priority_weight
        record = facts.notes or self._record(facts)
        expected_in = facts.expected_in
        row = self._expected_row(expected_in) if expected_in else record.group * BINS
        return row, facts.tokens_saved / facts.bytes_freed * facts.priority_weight

    def _expected_row(self, num_requests: int) -> int:
        """Where the densities begin of what is expected that many requests after its last use."""
        place = BIN_OF[min(num_requests, LAST_AGE)]
        of = ("expected", place)
        is_new = of not in self._groups
        row = self._group(of) * BINS
        if is_new:
            self._expected[row] = np.array([density_of_hint(left) for left in _AGES[place] - _AGES])
            self._table[row : row + BINS] = self._expected[row]
        return row

    def rank(self, facts: Facts) -> float:
        row, weight = self.weigh(facts)
        if row >= PATHS:
            found = self.rhythm.densities(np.array([row - PATHS]), np.array([facts.age]))
            return float(found[0]) * weight
        density: float = self._table.item(row + BIN_OF[min(facts.age, LAST_AGE)])
        return density * weight

    def ranks(self, groups: Ints, weights: Floats, ages: Ints) -> Floats:
        bins = _BIN_OF.take(ages, None, None, "clip")  # older ones have the bin of the last age
        bins += groups
        ranks: Floats = self._table.take(bins, None, None, "clip")  # none is outside: this is faster than to check it
        if (paths := (groups >= PATHS).nonzero()[0]).size:
            ranks[paths] = self.rhythm.densities(groups[paths] - PATHS, ages[paths])
        ranks *= weights
        return ranks

    # What happens

    def entered(self, facts: Facts) -> None:
        """Record that it was put there, again perhaps, or was not admitted: its age begins, its history stays."""
        self._advance(facts.now)
        if facts.last_used == 0:
            return
        record = facts.notes
        if record is None:
            record = self._record(facts)
        else:
            self._move(record, facts, facts.now)
        if facts.is_live:
            record.live = True
        else:
            self._let_go(record)

    def changed(self, facts: Facts) -> None:
        """Note that it got or lost descendants, or another kind, or takes over the last use of what it lost."""
        record = facts.notes
        if record is not None:
            last = max(record.last, facts.now - facts.age)
            if record.below is not facts.has_below or record.kind is not facts.kind or record.last < last:
                self._move(record, facts, last)

    def hit(self, facts: Facts) -> None:
        """Record that a request resumes from it."""
        self._advance(facts.now)
        self._count(facts)

    def missed(self, facts: Facts) -> None:
        """Record that a request would have resumed from it."""
        self._advance(facts.now)
        self._count(facts)

    def evicted(self, facts: Facts) -> None:
        """Record that it goes: its record stays."""
        if facts.notes is not None:
            self._let_go(facts.notes)

    def _record(self, facts: Facts) -> CheckpointRecord:
        record = facts.notes = CheckpointRecord(facts)
        if facts.num_tokens > self._context and facts.kind is Kind.PROMPT_END:
            self._context = 1 << (facts.num_tokens - 1).bit_length()
        record.group = self._group(record.classify(self._context))
        self._exposure.join(record, self._now)
        return record

    def _count(self, facts: Facts) -> None:
        record = facts.notes or self._record(facts)
        age = self._now - 1 - record.last
        if not 0 <= age <= LAST_AGE:
            age = LAST_AGE if age > 0 else 0
        self._noted.append(record.group * BINS + BIN_OF[age])
        record.hits += 1
        self._regroup(record, self._now)

    def _move(self, record: CheckpointRecord, facts: Facts, last: int) -> None:
        """Note that what it is, or when it was last used, has changed."""
        record.below = facts.has_below
        record.kind = facts.kind
        self._regroup(record, last)

    def _let_go(self, record: CheckpointRecord) -> None:
        """Forget what has gone longest if too many have."""
        if record.live:
            record.live = False
            self._gone.append(record)
        while len(self._gone) > MAX_WATCHED:
            oldest = self._gone.popleft()
            if not oldest.live and oldest.place != NOWHERE:
                self._exposure.leave(oldest, self._now)

    def _regroup(self, record: CheckpointRecord, last: int) -> None:
        """Count its exposure by the class and the last use that it has from now on."""
        group = self._group(record.classify(self._context))
        if record.place == NOWHERE:
            record.group, record.last = group, last
            self._exposure.join(record, self._now)
        elif group != record.group or last != record.last:
            self._exposure.move(record, group, last, self._now)

    # What is learned

    def _advance(self, now: int) -> None:
        self._now = now
        if now - self._fitted_at >= REFIT:
            self._fit()

    def _group(self, of: Class) -> int:
        """The number of a class. One that is new has the densities of the coarser one until the next fit."""
        group = self._groups.get(of)
        if group is None:
            parent = self._group(of[:-1]) if len(of) > 2 else ANY
            group = self._groups[of] = len(self._groups)
            self._parents.append(parent)
            self._levels[len(of) - CLASS_SIZES[0]].append(group)
            self._hierarchy = None
            self._counts = np.concatenate([self._counts, np.zeros((2, 1, BINS))], axis=1)
            self._table = np.concatenate([self._table, self._table[parent * BINS : (parent + 1) * BINS]])
        return group

    def _fit(self) -> None:
        """Make the table of densities anew."""
        if self._hierarchy is None:
            self._hierarchy = Hierarchy(self._parents, self._levels, num_roots=2)
        counts = self._counts
        hits, exposure = counts
        exposure += self._exposure.count(len(self._groups), self._now)
        np.add.at(hits.reshape(-1), np.array(self._noted, np.int64), 1.0)
        self._noted = []
        self._fitted_at = self._now
        self._table = self._hierarchy.densities(counts).reshape(-1)
        self._table[SPARE * BINS : (SPARE + 1) * BINS] = 1.0
        for row, densities in self._expected.items():
            self._table[row : row + BINS] = densities
        counts *= FADING


class Exposure:
    """How long the watched records had which age, by group: counted for all at once, when that is asked for.

    What a record spent in a group before it left it, or moved, is noted, and counted with what all have spent since the
    last time.
    """

    def __init__(self) -> None:
        self._records: list[CheckpointRecord] = []
        self._watched = array("q")  # by place: group, request of the last use, and the one up to which it is counted
        self._spent = array("q")  # group, first age, and the one after the last

    def __len__(self) -> int:
        return len(self._records)

    def join(self, record: CheckpointRecord, now: int) -> None:
        """Watch a record from request `now` on."""
        record.place = len(self._records)
        self._records.append(record)
        self._watched.extend((record.group, record.last, now))

    def move(self, record: CheckpointRecord, group: int, last: int, now: int) -> None:
        """Give a watched record another group and last use, from request `now` on."""
        self._note(record, now)
        at = 3 * record.place
        record.group = self._watched[at] = group
        record.last = self._watched[at + 1] = last

    def leave(self, record: CheckpointRecord, now: int) -> None:
        """Watch a record no more, from request `now` on."""
        self._note(record, now)
        place, record.place = record.place, NOWHERE
        final, numbers = self._records.pop(), self._watched[-3:]
        del self._watched[-3:]
        if final is not record:
            self._records[place], final.place = final, place
            self._watched[3 * place : 3 * place + 3] = numbers

    def _note(self, record: CheckpointRecord, now: int) -> None:
        at = 3 * record.place + 2
        since = self._watched[at]
        if since < now:
            self._spent.extend((record.group, since - record.last, now - record.last))
            self._watched[at] = now

    def count(self, num_groups: int, now: int) -> Array:
        """Return the requests, times records, since the last call, by group and bin of age, `[num_groups, bins]`.

        Args:
            num_groups: as many as there are.
        """
        spent, watched = np.array(self._spent).reshape(-1, 3).T, np.array(self._watched).reshape(-1, 3)
        last, since = watched[:, 1], watched[:, 2]
        groups = np.concatenate([watched[:, 0], spent[0]])
        ages = np.stack([np.concatenate([since - last, spent[1]]), np.concatenate([now - last, spent[2]])])
        np.maximum(ages, 0, out=ages)
        watched[:, 2] = now
        self._spent, self._watched = array("q"), array("q", watched.tobytes())
        # All of the bins from the first age to the last is spent, less what is before the one and after the other.
        bins = _BIN_OF.take(ages, mode="clip")
        ages -= _EDGES.take(bins)
        bins += groups * BINS
        size = num_groups * BINS
        entered = np.bincount(bins[0], minlength=size) - np.bincount(bins[1], minlength=size)
        parts = np.bincount(bins[1], ages[1], size) - np.bincount(bins[0], ages[0], size)
        counted: Array = np.cumsum(entered.reshape(-1, BINS), axis=1) * _WIDTHS + parts.reshape(-1, BINS)
        return counted


class Hierarchy:
    """Classes by their distance from the coarsest ones, which have no parent and no hits of their own: from counts of
    hits and exposure to densities.

    Each class begins from its parent, a coarser one, and corrects it. Tables have a row for each class, in the order in
    which they came, and a column for each bin of age.

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
        observed = [window(hits, reach) + PRIOR for reach in WINDOWS]
        hazards = np.empty_like(hits)
        hazards[: self._num_roots] = _FIRST_HAZARDS
        for rows, above in self._levels:
            hazards[rows] = refined(hazards[above], [found[rows] for found in observed], exposure[rows])
        found: Array = np.empty_like(hits)
        found[self._order] = density(hazards, _WIDTHS)
        return found


def refined(hazards: Array, observed: list[Array], exposure: Array) -> Array:
    """Expected hazards, corrected by what was observed: the hits in each of the windows and those of the prior, and the
    exposure, `[classes, bins]`.

    The hits that were observed over those expected are a factor, for all ages first, then for windows of them that get
    narrower: as far as there are hits to tell, each age gets a hazard of its own, and otherwise the shape stays.
    """
    for reach, hits in zip(WINDOWS, observed, strict=True):
        expected = window(exposure * hazards, reach)
        expected += PRIOR
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
