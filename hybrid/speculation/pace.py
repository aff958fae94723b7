"""How many drafts are worth computing.

A draft is worth its row of a pass if it is accepted often enough: with N tokens expected of a pass of T seconds, one
more row of s seconds and acceptance p pays where p / s > N / T. How often drafts are accepted is measured per request
and drafter, what passes cost per engine. With many requests in a pass N / T approaches 1 / s, so that drafts end by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

DECAY = 0.8
"""What an earlier verification counts, of a request's measured acceptance."""

PRIOR = 2.0
"""What is expected of a request counts as much as this many drafts of its own."""

MAX_PAUSES = 3
"""Drafts that do not pay are looked at again after 4, 16 and then every 64 passes: 4 to the power of this."""

MAX_PAUSES_BEFORE = 2
"""Pauses of other requests in a row of which a request takes heed: another text may be another matter."""

DRIFT = 1.02
"""The fastest pass counts as this many times slower with each later one of as many rows: sequences grow."""

MAX_WEIGHT = 16
"""Passes of as many rows count as this many, at most."""

MIN_PASSES = 3
"""Passes of as many rows before it is believed that they are slow: the first one may have been captured."""

FIRST_SHARE = 0.1
"""Cost of a row as a part of what a pass costs without rows, before it has been measured."""

MIN_SHARE = 0.01
"""The least cost of a row that is believed."""

DOUBTED_SHARE = 0.05
"""A draft that would pay at this cost of a row, and does not at the measured one, is computed now and then: the machine
may have been busy with something else when it was measured."""


class PassCost:
    """Seconds of a pass without prompts by its number of rows: a line through the fastest passes of each number.

    Whatever else the machine does makes a pass slower and never faster, so that the fastest of the latest passes says
    what a pass costs.
    """

    def __init__(self) -> None:
        self.share: float = FIRST_SHARE
        """Cost of one more row, as a part of the cost of a pass without rows."""
        self._empty_pass = 0.0
        self._drafts: dict[str, float] = {}
        self._left_out = self._measured_again = 0
        self._fastest: dict[int, tuple[float, int]] = {}
        self._passes = 0

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of this many rows took so long."""
        fastest, count = self._fastest.get(rows, (seconds, 0))
        self._fastest[rows] = min(seconds, fastest * DRIFT), min(count + 1, MAX_WEIGHT)
        self._passes += 1
        if count < 2 or self._passes % MAX_WEIGHT == 0:
            self.share = self._fitted()

    def is_slower(self, rows: int, drafts: int, expected: float, drafting: float = 0.0) -> bool:
        """Whether passes with drafts were so much slower than those without that `expected` more tokens are fewer per
        second: also where passes without drafts are captured, and those with drafts are launched.

        Args:
            rows: rows without drafts, each of which yields a token.
            drafts: rows of drafts.
            drafting: seconds that a drafter computes before the pass.
        """
        known = {own: seconds for own, (seconds, count) in self._fastest.items() if count >= MIN_PASSES}
        nearest = max((own for own in known if rows < own <= rows + drafts), default=None)
        if nearest is None or rows not in known:
            return False
        return (rows + expected) * known[rows] < rows * (known[nearest] + drafting)

    def is_doubted(self) -> bool:
        """Drafts were left out of a pass because of what rows cost. Whether to compute one of them, to measure that
        again: after more and more such passes."""
        self._left_out += 1
        if self._left_out <= 4**self._measured_again:
            return False
        self._left_out, self._measured_again = 0, min(self._measured_again + 1, MAX_PAUSES)
        return True

    def is_paid(self) -> None:
        """Drafts were computed because they pay."""
        self._left_out = self._measured_again = 0

    def drafted(self, drafter: str, count: int, seconds: float) -> None:
        """A drafter had up to `count` drafts for each of several requests in this time."""
        each = seconds / count
        self._drafts[drafter] = min(each, self._drafts.get(drafter, each) * DRIFT)

    def seconds_of(self, drafter: str) -> float:
        """What a drafter takes to compute a draft for each of several requests; 0: it is not known, or is nothing."""
        return self._drafts.get(drafter, 0.0)

    def share_of(self, drafter: str) -> float:
        """What a drafter takes to compute a draft for each of several requests, as a part of the cost of a pass without
        rows. Before that is known it costs nothing, and is tried."""
        return self.seconds_of(drafter) / self._empty_pass if self._empty_pass > 0 else 0.0

    def _fitted(self) -> float:
        """The share by weighted least squares; a number of rows of which there was one pass says nothing."""
        known = [(rows, seconds, count) for rows, (seconds, count) in self._fastest.items() if count > 1]
        weight = sum(count for _, _, count in known)
        if len(known) < 2:
            return FIRST_SHARE
        rows = sum(count * rows for rows, _, count in known) / weight
        seconds = sum(count * seconds for _, seconds, count in known) / weight
        spread = sum(count * (own - rows) ** 2 for own, _, count in known)
        slope = sum(count * (own - rows) * (time - seconds) for own, time, count in known) / spread
        base = self._empty_pass = seconds - slope * rows
        return 1.0 if base <= 0 else min(max(slope / base, MIN_SHARE), 1.0)


class Worth:
    """What a pass yields and costs, draft by draft.

    Args:
        rows: rows of the pass without drafts of this request.
        share: cost of a row as a part of the cost of a pass without rows.
        drafting: what it costs to have a draft for it, in the same unit.
    """

    def __init__(self, rows: int, share: float, drafting: float = 0.0) -> None:
        self._share = share + drafting
        self._expected = float(rows)
        self._cost = 1.0 + share * rows

    def pays(self, chance: float) -> bool:
        """Whether one more draft that is accepted with this chance raises the tokens per second."""
        return chance * self._cost > self._share * self._expected

    def take(self, chances: Iterable[float]) -> int:
        """Add drafts as long as they pay; returns how many."""
        count = 0
        for chance in chances:
            if not self.pays(chance):
                break
            self._expected, self._cost, count = self._expected + chance, self._cost + self._share, count + 1
        return count


class Acceptance:
    """How often drafts of one drafter are accepted, given that those before them were, and whether it is asked.

    Args:
        prior: what is expected before there was any.
        pauses: how many pauses there were in a row for other requests.

    Attributes:
        pauses: the same for this one.
    """

    def __init__(self, prior: float, pauses: int = 0) -> None:
        self.pauses: int = min(pauses, MAX_PAUSES_BEFORE)
        self._hits = PRIOR * prior
        self._trials = PRIOR
        self._left = 4**self.pauses // 2 if pauses else 0

    @property
    def rate(self) -> float:
        """The measured probability."""
        return self._hits / self._trials

    def observe(self, offered: int, accepted: int) -> None:
        """Of a chain of `offered` drafts the first `accepted` were right."""
        trials = accepted + (accepted < offered)
        self._hits = DECAY * self._hits + accepted
        self._trials = DECAY * self._trials + trials

    def is_due(self) -> bool:
        """Whether no pause lasts. Asked once for each pass."""
        self._left = max(self._left - 1, -1)
        return self._left < 0

    def paid(self, is_paid: bool) -> None:
        """Whether drafts paid. If not, there is a pause, each longer than the one before."""
        self.pauses = 0 if is_paid else min(self.pauses + 1, MAX_PAUSES)
        self._left = 0 if is_paid else 4**self.pauses

    def count(self, limit: int, worth: Worth) -> int:
        """How many drafts to compute, of a drafter that takes time for each; at least one, to measure it.

        Args:
            limit: the most.
            worth: of the pass without them.
        """
        rate = self.rate
        count = worth.take(rate**ahead for ahead in range(1, limit + 1))
        self.paid(count > 0)
        return max(count, 1)
