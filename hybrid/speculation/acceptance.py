"""Acceptance of drafts, as it is measured: of a drafter, by the number of right tokens before a draft, and by the
probability that a predictor gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

DECAY = 0.85
"""Weight of an earlier draft in the acceptance of a drafter."""

PRIOR = 3.0
"""Drafts that the expected acceptance of a drafter counts as."""

MAX_WAIT = 64
"""The most passes between two in which a drafter is asked whose drafts are not worth computing."""

INHERITED = 5
"""Fruitless passes of other requests in a row, of which a request takes heed: another text may be another matter."""


class Acceptance:
    """Share of a drafter's drafts that are right, and when the drafter is asked.

    A drafter that says how probable its drafts are is compared with what it says: `rate` is then the number of right
    drafts as a part of those that should have been right.

    Args:
        rate: expected before there was any draft.
        misses: fruitless passes of other requests.

    Attributes:
        misses: passes in a row in which none of its drafts was worth computing.
        longest: accepted drafts of the latest pass.
    """

    def __init__(self, rate: float, misses: int = 0) -> None:
        self.misses: int = min(misses, INHERITED)
        self.longest: int = 0
        self._right, self._expected = PRIOR * rate, PRIOR
        self._waits_until = self._wait()

    @property
    def rate(self) -> float:
        """The measured share."""
        return min(self._right / self._expected, 1.0)

    def observe(self, expected: float, right: float) -> None:
        """Count drafts that were compared with what came.

        Args:
            expected: how many should have been right.
            right: how many were.
        """
        self._right = DECAY * self._right + right
        self._expected = DECAY * self._expected + expected

    def should_ask(self, now: int) -> bool:
        """Return whether to ask the drafter in a pass.

        Args:
            now: the number of the pass, among those of the request; the first is 1.
        """
        return now > self._waits_until

    def was_worth(self, is_worth: bool, now: int) -> None:
        """Record whether drafts were worth computing. If not, there is a pause, twice as long as the one before."""
        self.misses = 0 if is_worth else self.misses + 1
        self._waits_until = now + self._wait() if self.misses else 0

    def _wait(self) -> int:
        return min((1 << self.misses) // 4, MAX_WAIT)


class _Rates:
    """Shares of right drafts of several kinds, learned token by token.

    Args:
        rates: those expected before anything was learned, one for each kind.
    """

    PRIOR = 2.0
    """Tokens that the expected rates count as."""

    MAX_TOKENS = 32.0
    """Tokens that are remembered of each rate: later ones count more."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._counts = [self.PRIOR] * len(self._rates)

    def of_request(self) -> Self:
        """Return the rates for one request: what is known, until its own tokens say otherwise."""
        return type(self)(self._rates)

    def absorb(self, own: Self) -> None:
        """Learn what a request has learned."""
        for kind, (rate, count) in enumerate(zip(own._rates, own._counts, strict=True)):
            total = self._counts[kind] + count - self.PRIOR
            if count > self.PRIOR:
                self._rates[kind] += (rate - self._rates[kind]) * (count - self.PRIOR) / total
                self._counts[kind] = min(total, self.MAX_TOKENS)


BUCKETS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, *[8] * 2, *[9] * 3, *[10] * 4, *[11] * 8, 12)
"""The rate for each number of right tokens; for more of them the last one."""

LAST: int = len(BUCKETS) - 1


class AcceptanceByDepth(_Rates):
    """Acceptance of drafts from a source by the number of tokens before them for which it was right: one rate for each
    of `BUCKETS`."""

    def ahead(self, right: int, count: int) -> list[float]:
        """Return the chance of each of `count` tokens after `right` right ones, if those before it are right."""
        rates = self._rates
        found = [rates[bucket] for bucket in BUCKETS[min(right, LAST) : right + count]]
        if len(found) < count:
            found += [rates[-1]] * (count - len(found))
        return found

    def observe(self, right: int, accepted: int, is_wrong: bool) -> None:
        """Count `accepted` more right tokens after `right` ones, and one that was wrong."""
        rates, counts, end = self._rates, self._counts, right + accepted
        for at in range(right, end + is_wrong):
            bucket = BUCKETS[at] if at < LAST else BUCKETS[LAST]
            if counts[bucket] < self.MAX_TOKENS:
                counts[bucket] += 1
            rates[bucket] += ((at < end) - rates[bucket]) / counts[bucket]


CLAIMS = 10
"""Probabilities that a predictor gives are counted by tenths."""

CLAIMED: tuple[float, ...] = tuple([(tenth + 0.5) / CLAIMS for tenth in range(CLAIMS)])
"""Rates of a predictor that is believed."""


class PredictedChain(NamedTuple):
    """A chain of a predictor.

    Attributes:
        position: of the first token.
        tokens: that it has named.
        claimed: the probability that it gave each.
    """

    position: int
    tokens: Sequence[int]
    claimed: Sequence[float]


class Claims(_Rates):
    """Acceptance of a predictor's drafts, one rate for each tenth of what it claims. Where the model takes its most
    probable token, which the predictor names, that token comes more often than its probability says."""

    @property
    def rates(self) -> Sequence[float]:
        """The rates of each tenth."""
        return self._rates

    def of(self, claimed: float) -> float:
        """Return the chance of a draft that was said to have this one."""
        return rate_of(self._rates, claimed)

    def observe(self, claimed: float, is_right: bool) -> None:
        """Count a draft that was said to have this chance."""
        kind = min(int(claimed * CLAIMS), CLAIMS - 1) if claimed > 0 else 0
        self._counts[kind] = count = min(self._counts[kind] + 1, self.MAX_TOKENS)
        self._rates[kind] += (is_right - self._rates[kind]) / count

    def compare(self, chain: PredictedChain, ids: Sequence[int]) -> None:
        """Compare a chain with the tokens that came, whether they were computed as drafts or not."""
        for at, (token, claimed) in enumerate(zip(chain.tokens, chain.claimed, strict=True), chain.position):
            if at >= len(ids):
                break
            self.observe(claimed, ids[at] == token)
            if ids[at] != token:
                break


def rate_of(rates: Sequence[float], claimed: float) -> float:
    """Return how often a draft that was said to have this chance was right, by the rates of `Claims`."""
    return rates[min(int(claimed * CLAIMS), CLAIMS - 1)] if claimed > 0 else 0.0  # it may be NaN
