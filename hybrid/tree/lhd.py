"""Learned hit density: the default policy.

What a checkpoint is worth is the number of hits to come for the room and the time that it takes. Both are learned from
what happens, for classes of checkpoints: why it was put there, whether it has descendants, how often it was
hit, how many turns lie before it. Time counts requests.

* For each class and age (in half octaves) are counted the hits and the *exposure*: the requests that came while
  checkpoints of that class had that age. Their ratio is the hazard of a hit.
* A checkpoint that was evicted, or not admitted, is still watched: its exposure counts, and so do the hits that it
  would have had (`missed`). What is learned is therefore how prefixes are reused, not what this cache happened to keep,
  and a class that is always evicted can come back.
* A class seldom seen borrows from the coarser one, down to a prior of 1 / (age + 10).
* From the hazard follows, for every age, the density: discounted hits to come, over discounted time until then.
* `rank` is density times tokens saved per byte freed.

It descends from LHD (Beckmann et al., NSDI 2018); hazards with censored data, ghosts and discounting are what differs.
`bench/hit_rate.py` measures it.
"""

from __future__ import annotations

from collections import deque
from math import exp, log2

from hybrid.tree.node import Kind
from hybrid.tree.policy import Facts, Policy

BINS = 27
"""Half octaves of age + 1: the last begins at about 8000 requests."""

EXACT_HITS = 3
"""Numbers of hits up to this one are distinguished exactly; larger ones in half octaves."""

DISCOUNT = 0.01
"""Per request: what happens more than about a hundred requests from now counts little."""

PRIOR = 1.0
"""Hits with which a coarser class speaks for a finer one."""

NEIGHBOURS = 0.5
"""Weight of the bins on both sides of an age: ages are noisy."""

FADING, REFIT = 0.9, 50
"""Counts fade by this factor each time the tables are rebuilt."""

EXPOSED_AT_ONCE = 96
"""Records whose exposure is brought up to date with each request: all of some thousands within a refit."""

MAX_WATCHED = 20_000
"""Records beyond this many are forgotten once their checkpoint has gone."""

Class = tuple[object, ...]
"""(kind, has_below, hits up to EXACT_HITS, octave of turns or of more hits), and its prefixes."""


def age_bin(age: int) -> int:
    return min(BINS - 1, int(2 * log2(age + 1) + 1e-9))


def first_ages() -> list[int]:
    """The first age of each bin, and of the one after the last. An empty bin has the first age of the next."""
    edges = []
    age = 0
    for wanted in range(BINS + 1):
        while int(2 * log2(age + 1) + 1e-9) < wanted:
            age += 1
        edges.append(age)
    return edges


EDGES = first_ages()
BIN_OF = [age_bin(age) for age in range(EDGES[BINS] + 1)]
LAST_AGE = len(BIN_OF) - 1


class Record:
    """What is known of a checkpoint, there or gone.

    Attributes:
        last: request at which it was last put there or used.
        counted: its exposure is counted up to this request.
        live: it is in the cache.
    """

    __slots__ = ("below", "counted", "hits", "kind", "last", "live", "of", "turn")

    def __init__(self, facts: Facts) -> None:
        self.kind: Kind = facts.kind
        self.turn: int = facts.turn
        self.hits: int = facts.hits
        self.below: bool = facts.has_below
        self.last: int = facts.now - facts.age
        self.counted: int = self.last
        self.live: bool = True
        self.of: Class = self.classify()

    def classify(self) -> Class:
        if self.hits < EXACT_HITS:
            fine = min(3, int(log2(self.turn + 1)))  # 0, 1 to 2, 3 to 6, 7 and more turns
        else:
            fine = min(7, int(2 * log2((self.hits + 1) / (EXACT_HITS + 1))))
        return (self.kind, self.below, min(self.hits, EXACT_HITS), fine)


class Counts:
    """Hits and exposure per age bin."""

    __slots__ = ("exposure", "hits")

    def __init__(self) -> None:
        self.hits: list[float] = [0.0] * BINS
        self.exposure: list[float] = [0.0] * BINS

    def add(self, other: Counts) -> None:
        self.hits = [a + b for a, b in zip(self.hits, other.hits, strict=True)]
        self.exposure = [a + b for a, b in zip(self.exposure, other.exposure, strict=True)]

    def fade(self) -> None:
        self.hits = [FADING * value for value in self.hits]
        self.exposure = [FADING * value for value in self.exposure]


class LearnedHitDensity(Policy):
    """Evict the fewest expected hits per byte, as learned from past hits."""

    def __init__(self) -> None:
        self._now = 0
        self._fitted_at = 0
        self._counts: dict[Class, Counts] = {}
        self._watched: deque[Record] = deque()
        self._densities: dict[Class, list[float]] = {}
        self._fit()

    @property
    def num_watched(self) -> int:
        """Number of checkpoints, stored or not, whose use is being counted."""
        return len(self._watched)

    def rank(self, facts: Facts) -> float:
        if facts.last_used == 0:  # spare and not used yet: evicted before all others, the least useful first
            return -1.0 / (1 + facts.tokens_saved)
        record = facts.notes or self._record(facts)
        densities = self._densities
        table = densities.get(record.of)
        if table is None:
            table = densities.get(record.of[:3]) or densities.get(record.of[:2]) or densities[()]
        age = facts.age
        density = table[BIN_OF[age] if age < LAST_AGE else BINS - 1]
        value = density * facts.tokens_saved / facts.bytes_freed
        return value * facts.priority_weight

    # What happens

    def entered(self, facts: Facts) -> None:
        """A checkpoint was put there, again perhaps, or was not admitted: its age begins, its history stays."""
        self._advance(facts.now)
        if facts.last_used == 0:
            return
        record = facts.notes or self._record(facts)
        self._expose(record)
        record.last = record.counted = facts.now
        record.live = facts.is_live
        self._change(record, facts)

    def changed(self, facts: Facts) -> None:
        """Whether it has descendants, or its kind, has changed."""
        record = facts.notes
        if record is not None:
            self._expose(record)
            self._change(record, facts)

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
            facts.notes.live = False

    def _record(self, facts: Facts) -> Record:
        record = facts.notes = Record(facts)
        self._watched.append(record)
        return record

    def _count(self, facts: Facts) -> None:
        record = facts.notes or self._record(facts)
        self._expose(record)
        age = max(0, self._now - 1 - record.last)
        self._of(record).hits[BIN_OF[min(age, LAST_AGE)]] += 1
        record.hits += 1
        record.last = record.counted = self._now
        record.of = record.classify()

    def _change(self, record: Record, facts: Facts) -> None:
        record.below = facts.has_below
        record.kind = facts.kind
        record.of = record.classify()

    def _of(self, record: Record) -> Counts:
        counts = self._counts.get(record.of)
        if counts is None:
            counts = self._counts[record.of] = Counts()
        return counts

    def _expose(self, record: Record) -> None:
        """Count the requests since the last call as exposure, at the ages that the checkpoint had meanwhile."""
        now = self._now
        if record.counted >= now:
            return
        age, end = record.counted - record.last, now - record.last
        record.counted = now
        counts = self._counts.get(record.of)
        exposure = counts.exposure if counts is not None else self._of(record).exposure
        at = BIN_OF[age] if age < LAST_AGE else BINS - 1
        if at == BINS - 1 or end <= EDGES[at + 1]:
            exposure[at] += end - age
            return
        while at < BINS - 1 and end > EDGES[at + 1]:
            exposure[at] += EDGES[at + 1] - age
            age = EDGES[at + 1]
            at += 1
        exposure[at] += end - age

    # What is learned

    def _advance(self, now: int) -> None:
        if now == self._now:
            return
        watched, since = self._watched, self._now
        for _ in range(min(len(watched), EXPOSED_AT_ONCE * (now - since))):
            record = watched.popleft()
            if record.counted < since:
                self._expose(record)
            if record.live or len(watched) < MAX_WATCHED:
                watched.append(record)
        self._now = now
        if now - self._fitted_at >= REFIT:
            self._fitted_at = now
            self._fit()

    def _fit(self) -> None:
        """Make the table of densities anew. Coarse classes first: each is the prior of the finer ones."""
        totals: dict[Class, Counts] = {}
        for fine, counts in self._counts.items():
            for length in (2, 3, 4):
                totals.setdefault(fine[:length], Counts()).add(counts)
            counts.fade()
        middle = [(EDGES[at] + max(EDGES[at], EDGES[at + 1] - 1)) / 2 for at in range(BINS)]
        hazards: dict[Class, list[float]] = {(): [1 / (age + 10) for age in middle]}
        self._densities = {(): density(hazards[()])}
        for of in sorted(totals, key=len):
            coarser = hazards[of[:-1] if len(of) > 2 else ()]
            hits, exposure = smooth(totals[of].hits), smooth(totals[of].exposure)
            hazards[of] = [
                (hit + PRIOR) / (exposed + PRIOR / above)
                for hit, exposed, above in zip(hits, exposure, coarser, strict=True)
            ]
            self._densities[of] = density(hazards[of])


def smooth(values: list[float]) -> list[float]:
    """Each bin with a part of its neighbours'."""
    padded = [0.0, *values, 0.0]
    return [
        value + NEIGHBOURS * (below + above) for below, value, above in zip(padded, values, padded[2:], strict=False)
    ]


def density(hazard: list[float]) -> list[float]:
    """Discounted hits to come over discounted time until then, from each age bin on.

    Within a bin the hazard is constant, so that both integrals have a closed form; one pass from the last bin back.
    """
    densities = [0.0] * BINS
    hits = time = 0.0
    for at in range(BINS - 1, -1, -1):
        width = 1e5 if at == BINS - 1 else EDGES[at + 1] - EDGES[at]
        if width:
            rate = hazard[at] + DISCOUNT
            stays = exp(-rate * width)
            spent = (1 - stays) / rate
            hits = spent * hazard[at] + stays * hits
            time = spent + stays * time
        densities[at] = hits / time
    return densities
