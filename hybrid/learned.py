"""Learned hit density (placeholder until the research is in)."""

from __future__ import annotations

from hybrid.eviction import Facts, Usage

BINS = 40


def age_bin(age: int) -> int:
    """Half-octaves of age + 1."""
    value, octave = age + 1, (age + 1).bit_length() - 1
    return 2 * octave + (value >= 1.41421356 * (1 << octave))


class LearnedHitDensity:
    def __init__(self) -> None:
        self._hits: dict[tuple, list[float]] = {}
        self._ends: dict[tuple, list[float]] = {}
        self._events = 0
        self._density: dict[tuple, list[float]] = {}

    def _class(self, kind: str, hits: int) -> tuple:
        return (kind, min(hits, 3))

    def _count(self, table, cls, age):
        row = table.get(cls)
        if row is None:
            row = table[cls] = [0.0] * BINS
        row[min(age_bin(age), BINS - 1)] += 1
        self._events += 1
        if self._events % 50 == 0:
            self._fit()

    def hit(self, facts: Facts) -> None:
        self._count(self._hits, self._class(facts.kind, facts.hits), facts.age)

    def missed(self, usage: Usage, age: int, num_tokens: int) -> None:
        self._count(self._hits, self._class(usage.kind, usage.hits), age)

    def evicted(self, facts: Facts) -> None:
        self._count(self._ends, self._class(facts.kind, facts.hits), facts.age)

    def _fit(self) -> None:
        self._density.clear()
        for table in (self._hits, self._ends):
            for row in table.values():
                for i in range(BINS):
                    row[i] *= 0.97
        for cls in set(self._hits) | set(self._ends):
            hits = self._hits.get(cls) or [0.0] * BINS
            ends = self._ends.get(cls) or [0.0] * BINS
            out = [0.0] * BINS
            h = life = alive = 0.0
            for i in range(BINS - 1, -1, -1):
                h += hits[i]
                alive += hits[i] + ends[i]
                width = 2 ** (i / 2) * 0.41
                life += alive * width
                out[i] = (h + 0.1) / (life + 1.0 + 0.1 * 2 ** (i / 2))
            self._density[cls] = out

    def rank(self, facts: Facts) -> float:
        kind = facts.kind
        if kind == "pages":
            return -1.0 / (1 + facts.last_used)
        if facts.last_used == 0:
            return -1e-12 + facts.tokens_saved * 1e-18
        age = facts.age
        row = self._density.get(self._class(kind, facts.hits))
        density = row[min(age_bin(age), BINS - 1)] if row else 1 / (age + 10)
        return density * facts.tokens_saved / facts.bytes_freed
