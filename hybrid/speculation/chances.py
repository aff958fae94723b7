"""How probable drafts are, as that was measured: those of a source by the number of tokens before them for which it was
right, those of a predictor by the probability that it gives them itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

BUCKETS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, *[8] * 2, *[9] * 3, *[10] * 4, *[11] * 8, 12)
"""For each number of right tokens the rate that counts; for more of them the last one."""

LAST: int = len(BUCKETS) - 1

PRIOR = 2.0
"""What was known before a request counts as this many tokens of its own."""

MAX_TOKENS = 32.0
"""As many tokens are remembered of each rate: later ones count more."""


class _Rates:
    """How often drafts of several kinds were right, learned token by token.

    Args:
        rates: those expected before anything was learned, one for each kind.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._counts = [PRIOR] * len(self._rates)

    def of_request(self) -> Self:
        """For one request: what is known, until its own tokens say otherwise."""
        return type(self)(self._rates)

    def absorb(self, own: Self) -> None:
        """Learn what a request has learned."""
        for kind, (rate, count) in enumerate(zip(own._rates, own._counts, strict=True)):
            total = self._counts[kind] + count - PRIOR
            if count > PRIOR:
                self._rates[kind] += (rate - self._rates[kind]) * (count - PRIOR) / total
                self._counts[kind] = min(total, MAX_TOKENS)


class Chances(_Rates):
    """Of the drafts of a source, one rate for each of `BUCKETS`."""

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


CLAIMS = 10
"""Probabilities that a predictor gives are counted by tenths."""

CLAIMED: tuple[float, ...] = tuple([(tenth + 0.5) / CLAIMS for tenth in range(CLAIMS)])
"""It is believed, at first."""


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
    """Of the drafts of a predictor, one rate for each tenth of what it claims. Where the model takes its most probable
    token, which the predictor names, that token comes more often than its probability says."""

    @property
    def rates(self) -> Sequence[float]:
        """Those of each tenth."""
        return self._rates

    def of(self, claimed: float) -> float:
        """The chance of a draft that was said to have this one."""
        return rate_of(self._rates, claimed)

    def observe(self, claimed: float, is_right: bool) -> None:
        """A draft that was said to have this chance was right, or not."""
        kind = min(int(claimed * CLAIMS), CLAIMS - 1) if claimed > 0 else 0
        self._counts[kind] = count = min(self._counts[kind] + 1, MAX_TOKENS)
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
    """How often a draft that was said to have this chance was right, by the rates of `Claims`."""
    return rates[min(int(claimed * CLAIMS), CLAIMS - 1)] if claimed > 0 else 0.0  # it may be NaN
