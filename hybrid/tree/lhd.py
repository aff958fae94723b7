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

It descends from LHD (Beckmann et al., NSDI 2018); hazards with censored data, ghosts and discounting are what differs.
`bench/hit_rate.py` measures it.
"""

from __future__ import annotations

from collections import deque
from math import log2

import numpy as np

from hybrid.tree.cohorts import Cohorts
from hybrid.tree.hazards import BIN_OF, BINS, EDGES, LAST_AGE, Hierarchy
from hybrid.tree.node import Kind
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

ENDS = Kind.TURN_END, Kind.PROMPT_END
"""Kinds of checkpoints that a conversation continues from."""

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

_BIN_OF = np.array(BIN_OF)
_FADING, _NONE, _ONE = np.array(FADING), np.array(0.0), np.array(1.0)  # faster operands than numbers are


class Record:
    """What is known of a checkpoint, there or gone.

    Attributes:
        num_tokens: length of its prefix.
        last: request at which it was last put there or used.
        live: it is in the cache.
        group: the number of its class.
        watched: its exposure counts.
    """

    __slots__ = ("below", "group", "hits", "kind", "last", "live", "num_tokens", "turn", "watched")

    def __init__(self, facts: Facts) -> None:
        self.kind: Kind = facts.kind
        self.turn: int = facts.turn
        self.hits: int = facts.hits
        self.num_tokens: int = facts.num_tokens
        self.below: bool = facts.has_below
        self.last: int = facts.now - facts.age
        self.live: bool = True
        self.watched: bool = False
        self.group: int = ANY

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
    """Evict the fewest expected hits per byte, as learned from past hits."""

    def __init__(self) -> None:
        self._now = 0
        self._fitted_at = 0
        self._context = 1
        self._num_watched = 0
        self._gone: deque[Record] = deque()
        self._cohorts = Cohorts(EDGES[:BINS])
        self._groups: dict[Class, int] = {(): ANY, ("spare",): SPARE}
        self._parents = [ANY, ANY]
        self._levels: list[list[int]] = [[] for _ in CLASS_SIZES]
        self._hierarchy: Hierarchy | None = None  # of the classes that there are; None: one has come
        self._counts = np.zeros((2, 2, BINS))  # hits and exposure
        self._noted: list[int] = []  # hits since the last fit, by their place in the table
        self._table = np.ones(2 * BINS)  # densities by class and bin of age
        self._fit()

    @property
    def num_watched(self) -> int:
        """Number of checkpoints, stored or not, whose use is being counted."""
        return self._num_watched

    def weigh(self, facts: Facts) -> tuple[int, float]:
        """Where the densities of its class begin in their table, and what they count for."""
        if facts.last_used == 0:  # spare and not used yet: evicted before all others, the least useful first
            return SPARE * BINS, -1.0 / (1 + facts.tokens_saved)
        record = facts.notes or self._record(facts)
        return record.group * BINS, facts.tokens_saved / facts.bytes_freed * facts.priority_weight

    def rank(self, facts: Facts) -> float:
        row, weight = self.weigh(facts)
        density: float = self._table.item(row + BIN_OF[min(facts.age, LAST_AGE)])
        return density * weight

    def ranks(self, groups: Ints, weights: Floats, ages: Ints) -> Floats:
        bins = _BIN_OF.take(ages, None, None, "clip")  # older ones have the bin of the last age
        bins += groups
        ranks: Floats = self._table.take(bins, None, None, "clip")  # none is outside: this is faster than to check it
        ranks *= weights
        return ranks

    # What happens

    def entered(self, facts: Facts) -> None:
        """A checkpoint was put there, again perhaps, or was not admitted: its age begins, its history stays."""
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
        """Whether it has descendants, or its kind, has changed."""
        record = facts.notes
        if record is not None and (record.below is not facts.has_below or record.kind is not facts.kind):
            self._move(record, facts, record.last)

    def hit(self, facts: Facts) -> None:
        """A request resumes from it."""
        self._advance(facts.now)
        self._count(facts)

    def missed(self, facts: Facts) -> None:
        """A request would have resumed from it."""
        self._advance(facts.now)
        self._count(facts)

    def evicted(self, facts: Facts) -> None:
        """It goes; its record stays."""
        if facts.notes is not None:
            self._let_go(facts.notes)

    def _record(self, facts: Facts) -> Record:
        record = facts.notes = Record(facts)
        if facts.num_tokens > self._context and facts.kind is Kind.PROMPT_END:
            self._context = 1 << (facts.num_tokens - 1).bit_length()
        record.group = self._group(record.classify(self._context))
        self._join(record)
        return record

    def _count(self, facts: Facts) -> None:
        record = facts.notes or self._record(facts)
        age = self._now - 1 - record.last
        if not 0 <= age <= LAST_AGE:
            age = LAST_AGE if age > 0 else 0
        self._noted.append(record.group * BINS + BIN_OF[age])
        record.hits += 1
        self._regroup(record, self._now)

    def _move(self, record: Record, facts: Facts, last: int) -> None:
        """What it is, or when it was last used, has changed."""
        record.below = facts.has_below
        record.kind = facts.kind
        self._regroup(record, last)

    def _let_go(self, record: Record) -> None:
        """Forget what has gone longest if too many have."""
        if record.live:
            record.live = False
            self._gone.append(record)
        while len(self._gone) > MAX_WATCHED:
            oldest = self._gone.popleft()
            if not oldest.live:
                self._leave(oldest)

    # Exposure

    def _join(self, record: Record) -> None:
        """Count its exposure from now on."""
        record.watched = True
        self._num_watched += 1
        self._cohorts.join(record.group, record.last, self._now)

    def _regroup(self, record: Record, last: int) -> None:
        """Count its exposure by the class and the last use that it has from now on."""
        group = self._group(record.classify(self._context))
        if not record.watched:
            record.group, record.last = group, last
            self._join(record)
        elif group != record.group or last != record.last:
            self._cohorts.move(record.group, record.last, group, last, self._now)
            record.group, record.last = group, last

    def _leave(self, record: Record) -> None:
        """Count its exposure until now, and not from now on."""
        if record.watched:
            record.watched = False
            self._num_watched -= 1
            self._cohorts.leave(record.group, record.last, self._now)

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
        exposure += self._cohorts.exposure(len(self._groups), self._now)
        np.maximum(exposure, _NONE, out=exposure)  # of a long pause only the end is counted
        np.add.at(hits.reshape(-1), np.array(self._noted, np.int64), _ONE)
        self._noted = []
        self._fitted_at = self._now
        self._table = self._hierarchy.densities(counts).reshape(-1)
        self._table[SPARE * BINS : (SPARE + 1) * BINS] = 1.0
        counts *= _FADING
