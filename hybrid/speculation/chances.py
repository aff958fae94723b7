"""How probable the next token of a source is, by the number of tokens before it for which the source was right."""

from __future__ import annotations

from collections.abc import Sequence

BUCKETS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, *[8] * 2, *[9] * 3, *[10] * 4, *[11] * 8, 12)
"""For each number of right tokens the rate that counts; for more of them the last one."""

LAST: int = len(BUCKETS) - 1

PRIOR = 2.0
"""What was known before a request counts as this many tokens of its own."""

MAX_TOKENS = 32.0
"""As many tokens are remembered of each rate: later ones count more."""


class Chances:
    """Rates that are learned token by token.

    Args:
        rates: those expected before anything was learned, one for each bucket.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._counts = [PRIOR] * len(self._rates)

    def of_request(self) -> Chances:
        """For one request: what is known, until its own tokens say otherwise."""
        return Chances(self._rates)

    def ahead(self, right: int, count: int) -> list[float]:
        """The chance of each of `count` tokens after `right` tokens that were right, if those before it are right."""
        rates = self._rates
        found = [rates[bucket] for bucket in BUCKETS[min(right, LAST) : right + count]]
        if len(found) < count:
            found += [rates[-1]] * (count - len(found))
        return found

    def observe(self, right: int, accepted: int, is_wrong: bool) -> None:
        """After `right` right tokens there were `accepted` more, and one that was wrong."""
        rates, counts, end = self._rates, self._counts, right + accepted
        for at in range(right, end + is_wrong):
            bucket = BUCKETS[at] if at < LAST else BUCKETS[LAST]
            if counts[bucket] < MAX_TOKENS:
                counts[bucket] += 1
            rates[bucket] += ((at < end) - rates[bucket]) / counts[bucket]

    def absorb(self, own: Chances) -> None:
        """Learn what a request has learned."""
        for bucket, (rate, count) in enumerate(zip(own._rates, own._counts, strict=True)):
            total = self._counts[bucket] + count - PRIOR
            if count > PRIOR:
                self._rates[bucket] += (rate - self._rates[bucket]) * (count - PRIOR) / total
                self._counts[bucket] = min(total, MAX_TOKENS)
