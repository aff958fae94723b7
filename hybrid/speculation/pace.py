"""How many drafts are worth computing.

Drafts are worth their rows of a pass if they raise the tokens per second: with N tokens expected of a pass of T
seconds, one more row of s seconds and acceptance p pays where p / s > N / T. A pass with drafts also takes longer than
one without because there are any: they are verified, and what was accepted is computed once more. How often drafts are
accepted is measured per request and drafter, what passes cost per engine. With many requests in a pass N / T approaches
1 / s, so that drafts end by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from math import exp, log

DECAY = 0.8
"""What an earlier verification counts, of a request's measured acceptance."""

PRIOR = 2.0
"""What is expected of a request counts as much as this many drafts of its own."""

TRUST = 4.0
"""A drafter that says how probable its drafts are is believed as if this many had been expected and were right."""

FORGET = 0.9
"""What an earlier draft counts, of that trust."""

PATIENCE = 4
"""As many times in a row drafts that were asked for are not worth a row before there is a pause."""

MAX_PAUSES = 3
"""Drafts that do not pay are looked at again after 4, 16 and then every 64 passes: 4 to the power of this."""

MAX_PAUSES_BEFORE = 2
"""Pauses of other requests in a row of which a request takes heed: another text may be another matter."""

LEAST_PASSES = 3
"""As many passes of a kind say what it costs."""

MOST_OFF = 0.25
"""How far a pass may be from what is expected, in the logarithm of its time: what is more does not count."""

FOLLOW = 0.02
"""What a pass counts for how fast the machine is at the time."""

MAX_WEIGHT = 32
"""Passes of as many rows count as this many, at most: the latest ones."""

FIT_EVERY = 16
"""After the first passes costs are computed once for this many."""

FIRST_SHARE = 0.1
"""Cost of a row as a part of what a pass costs without rows, before it has been measured."""

MIN_SHARE = 0.01
"""The least cost of a row that is believed, as a part of what a pass without drafts costs."""

FIRST_PAID, NUM_PLAIN = 4, 8
"""Where drafts always pay, after as many passes with some `NUM_PLAIN` in a row have none, and again after 4 times as
many, until it is known what such a pass takes: the first ones after others take longer than the next."""

RECENT = 8
"""Calls with rounds, of which what is between two of them takes as long as in a quarter: others were captured."""

EARLIER = 0.9
"""What an earlier call counts for how many tokens there are in one, on average."""

DOUBTED_SHARE = 0.05
"""A draft that would pay at this cost of a row, and does not at the measured one, is computed now and then: the machine
may have been busy with something else when it was measured."""


def clock_of(device_type: str) -> Callable[[], float]:
    """Seconds, by which passes and drafters are timed. A CPU computes in the calling thread, whose own time does not
    depend on what else the machine does."""
    return time.thread_time if device_type == "cpu" else time.perf_counter


Kind = int | str
"""A kind of pass: its rows, negative where some of them are drafts; or a token of the drafter of this name."""


class _Kind:
    """The latest passes of a kind, compared with the level of the machine at their times.

    Attributes:
        shares: the logarithms, at most `MAX_WEIGHT`.
        usual: what an eighth of them are less than.
        middle: what half of them are less than.
    """

    __slots__ = ("middle", "shares", "usual")

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.usual = self.middle = 0.0

    def add(self, share: float) -> None:
        """A pass."""
        shares = self.shares
        if len(shares) == MAX_WEIGHT:
            del shares[0]
        shares.append(share)
        ordered, count = sorted(shares), len(shares)
        self.usual, self.middle = ordered[count // 8], ordered[count // 2]


class Times:
    """How long passes of several kinds take, compared with each other.

    What else a machine does makes all passes slower for a while: as slow as they are at the time is the *level*. After
    the first ones only passes are looked at where one with drafts follows one without, or the other way round: as many
    of both, so that a busy machine does not make those slow that were measured then. Of these the slower ones say
    nothing: they may have been captured, or their replay.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._kinds: dict[Kind, _Kind] = {}
        self._was_plain = False  # the latest pass

    def observe(self, kind: Kind, seconds: float) -> None:
        """A pass of a kind took so long."""
        own, is_plain = self._kinds.get(kind), isinstance(kind, int) and kind > 0
        follows = is_plain is not self._was_plain
        if isinstance(kind, int):
            self._was_plain = is_plain
        if not follows and own is not None and len(own.shares) >= FIT_EVERY:
            return
        took = log(max(seconds, 1e-9))
        if own is None:
            if not self._kinds:
                self._level = took
            own = self._kinds[kind] = _Kind()
        if len(own.shares) >= LEAST_PASSES:
            self._level += FOLLOW * max(-MOST_OFF, min(took - self._level - own.middle, MOST_OFF))
        own.add(took - self._level)

    def of(self, kind: Kind) -> float:
        """Seconds of a pass of a kind, as fast as the machine is now; 0: it is not known."""
        own = self._kinds.get(kind)
        return exp(self._level + own.usual) if own is not None and len(own.shares) >= LEAST_PASSES else 0.0

    def passes(self, with_drafts: bool) -> list[tuple[int, float, int]]:
        """Rows, seconds, and what they count."""
        return [
            (abs(kind), self.of(kind), len(own.shares))
            for kind, own in self._kinds.items()
            if isinstance(kind, int) and (kind < 0) is with_drafts and len(own.shares) >= LEAST_PASSES
        ]


class BetweenCalls:
    """What the engine does between two calls, shared by the passes of a call: its rounds."""

    def __init__(self) -> None:
        self._num_calls = self._num_tokens = 0.0  # the latest ones count more
        self._yields: dict[int, tuple[float, float]] = {}  # by the number of drafts: rounds, and tokens of them
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def share(self, seconds: float, drafts: int, rounds: int, tokens: int) -> float:
        """What a round has to bear of the seconds between two calls: as much for each token, since how many tokens
        there are in a call follows from where it must end, and hardly from the number of drafts.

        Args:
            seconds: of this call.
            drafts: of each of its rounds.
            rounds: of this call.
            tokens: that it has yielded.
        """
        self._num_calls = self._num_calls * EARLIER + 1
        self._num_tokens = self._num_tokens * EARLIER + tokens
        num_rounds, own = self._yields.get(drafts, (0.0, 0.0))
        num_rounds, own = num_rounds * EARLIER + rounds, own * EARLIER + tokens
        self._yields[drafts] = num_rounds, own
        self._seconds.append(seconds)
        usual = sorted(self._seconds)[len(self._seconds) // 4]
        return usual * self._num_calls / self._num_tokens * own / num_rounds


class PassCost:
    """Seconds of a pass without prompts by its number of rows: a line through passes with drafts, and one through those
    without.

    Attributes:
        row: seconds of one more row.
        base: seconds of a pass without drafts and without rows.
        extra: seconds that a pass with drafts takes longer than one without of as many rows. Negative: it takes less,
            since several of them share what the engine does between passes.
        knows_plain: what a pass without drafts takes was measured.
    """

    def __init__(self) -> None:
        self.row: float = FIRST_SHARE
        self.base: float = 1.0
        self.extra: float = 0.0
        self.knows_plain: bool = False
        self._times = Times()
        self._passes = 0
        self._left_out, self._patience = 0, 1  # passes without drafts, and after how many what they cost is doubted
        # until `knows_plain`: passes with drafts in a row, after how many there are some without, how many are left
        self._paid, self._most_paid, self._num_plain = 0, FIRST_PAID, 0
        self._num_kinds, self._was_halved = 0, False  # numbers of rows of passes with drafts whose time is known

    def observe(self, rows: int, seconds: float, drafts: int) -> None:
        """A pass of this many rows took so long, of which some were drafts."""
        self._times.observe(-rows if drafts else rows, seconds)
        if drafts and self._left_out > self._patience:  # it was doubted
            self._left_out, self._patience = 0, min(4 * self._patience, 4**MAX_PAUSES)
        self._passes += 1
        if self._passes < FIT_EVERY or self._passes % FIT_EVERY == 0:
            self._fit()

    def worth(self, rows: int, drafting: float = 0.0) -> Worth:
        """What drafts are worth.

        Args:
            rows: other rows of the pass.
            drafting: seconds that it takes to have a draft.
        """
        return Worth(rows, self.base + self.row * rows, self.row + drafting, self.extra)

    def least(self, rows: int, drafter: str) -> float:
        """The chance from which on it pays to compute one more draft of a drafter, and a row for it.

        Args:
            rows: of the pass without it.
        """
        return (rows * self.row + self.drafting(drafter)) / (self.base + self.row * rows)

    def drafting(self, drafter: str) -> float:
        """Seconds in which a drafter computes a draft for each of several requests; 0: it is not known, or nothing."""
        return self._times.of(drafter)

    def drafted(self, drafter: str, count: int, seconds: float) -> None:
        """A drafter has computed up to `count` drafts for each of several requests in this time."""
        self._times.observe(drafter, seconds / count)

    def is_doubted(self, rows: int, chance: float) -> bool:
        """Drafts were left out of a pass, because of what they cost. Whether to compute the most probable ones, to
        measure that again: after more and more such passes, until a pass with drafts is observed.

        Args:
            rows: of the pass without drafts.
            chance: that it is accepted.
        """
        if chance * (1 + DOUBTED_SHARE * rows) <= DOUBTED_SHARE * rows:
            return False
        self._left_out += 1
        return self._left_out > self._patience

    def chosen(self, rows: int, count: int) -> int:
        """The number of drafts that a pass computes, where `count` of them pay best: the same, as a rule. Where too
        little is known of passes without any, some have none, else it would be believed for ever that drafts pay; and
        as long as passes with drafts are known by one number of rows alone, every other one has half as many, else it
        is not known what a row costs.

        Args:
            rows: of the pass without drafts.
        """
        if self._is_plain():
            return 0
        self._left_out = 0  # what drafts cost is measured
        self._was_halved = self._num_kinds < 2 and not self._was_halved
        if not self._was_halved:
            return count
        return next((half for half in range(count // 2, 0, -1) if is_common(rows + half)), count)

    def _is_plain(self) -> bool:
        """Whether a pass whose drafts would pay has none."""
        if self.knows_plain:
            return False
        if self._paid == self._most_paid:
            self._paid, self._most_paid = 0, min(4 * self._most_paid, 4**MAX_PAUSES)
            self._num_plain = NUM_PLAIN
        if not self._num_plain:
            self._paid += 1
            return False
        self._num_plain -= 1
        return True

    def _fit(self) -> None:
        """The lines. They have the same slope, which follows from passes with drafts if there are several numbers of
        rows of them, else from all passes. Where those with drafts take less than others it does not: then it is what
        was expected at first, until there are several numbers."""
        plain, drafted = self._times.passes(False), self._times.passes(True)
        every = plain + drafted
        self._num_kinds = len(drafted)
        self.knows_plain = sum(count for _, _, count in plain) >= FIT_EVERY
        if len(every) < 2:
            return
        slope = _slope(drafted if len(drafted) > 1 else every)
        without = _height(plain or drafted, max(slope, 0.0))
        is_known = len(drafted) > 1 or slope > 0
        least = MIN_SHARE * max(without, min(seconds for _, seconds, _ in every))
        self.row = max(slope, least) if is_known else FIRST_SHARE * without
        self.base = max(_height(plain or drafted, self.row), least)
        if plain and (len(drafted) > 1 or (drafted and not is_known)):
            self.extra = max(_height(drafted, self.row), least) - self.base
        else:
            self.extra = 0.0


def _slope(known: Sequence[tuple[int, float, int]]) -> float:
    """Of the line by weighted least squares."""
    weight = sum(count for _, _, count in known)
    rows = sum(count * rows for rows, _, count in known) / weight
    spread = sum(count * (own - rows) ** 2 for own, _, count in known)
    return sum(count * (own - rows) * time for own, time, count in known) / spread if spread else 0.0


def _height(known: Sequence[tuple[int, float, int]], slope: float) -> float:
    """Of a line of this slope, where there are no rows."""
    return sum(count * (time - slope * rows) for rows, time, count in known) / sum(count for _, _, count in known)


def is_common(rows: int) -> bool:
    """Whether passes of this many rows are computed. Passes are captured for each number of rows, which takes as long
    as many passes: there are to be few such numbers. (Others are computed where no such number would pay.)"""
    doublings = (rows - 1).bit_length() - 2  # two numbers from one power of two to the next, up to 64
    return rows % (1 << min(max(doublings, 0), 4)) == 0


class Worth:
    """What a pass yields and costs.

    Args:
        rows: rows of the pass without drafts of a request, each of which yields a token.
        without: cost of the pass without drafts.
        row: of one more row, and what it costs to have a draft for it.
        extra: what a pass costs in addition because there are drafts.
    """

    def __init__(self, rows: int, without: float, row: float, extra: float = 0.0) -> None:
        self._rows = rows
        self._without = without
        self._row = row
        self._extra = extra

    def best(self, chances: Sequence[float]) -> int:
        """How many drafts to compute, for the most tokens per second.

        Args:
            chances: that each is accepted, falling.
        """
        best, expected, cost = 0, float(self._rows), self._without + self._extra
        most = expected / self._without
        for count, chance in enumerate(chances, 1):
            expected, cost = expected + chance, cost + self._row
            if chance * cost <= expected * self._row and expected <= most * cost:  # from here on fewer and fewer
                break
            is_allowed = is_common(self._rows + count) or (count == len(chances) and not best)
            if is_allowed and expected > most * cost:
                best, most = count, expected / cost
        return best

    def gain(self, chances: Sequence[float], drafting: float) -> float:
        """Tokens per second with these drafts, as a multiple of those without.

        Args:
            chances: that each is accepted.
            drafting: cost of having them.
        """
        cost = self._without + self._extra + self._row * len(chances) + drafting
        return (self._rows + sum(chances)) * self._without / (self._rows * cost)

    def pays(self, chance: float, others: Sequence[float]) -> bool:
        """Whether one more draft that is accepted with this chance raises the tokens per second.

        Args:
            others: chances of those that there are, falling: the best of them are computed.
        """
        count = self.best(others)
        added = self._row if count else self._row + self._extra
        cost = self._without + (self._extra + count * self._row if count else 0.0)
        return chance * cost > (self._rows + sum(others[:count])) * added


class Acceptance:
    """How often drafts of one drafter are accepted, given that those before them were, and whether it is asked.

    Args:
        prior: what is expected before there was any.
        pauses: how many pauses there were in a row for other requests.
        trust: of other requests.

    Attributes:
        pauses: the same for this one.
        longest: tokens of the latest chain of a drafter that ends it by itself.
    """

    def __init__(self, prior: float, pauses: int = 0, trust: float = 1.0) -> None:
        self.pauses: int = min(pauses, MAX_PAUSES_BEFORE)
        self._hits = PRIOR * prior
        self._trials = PRIOR
        self._right, self._claimed = TRUST * trust, TRUST
        self._paused_until = 4**self.pauses // 2 if pauses else 0
        self._missed = 0
        self.longest: int = 0

    @property
    def rate(self) -> float:
        """The measured probability."""
        return self._hits / self._trials

    def observe(self, offered: int, accepted: int) -> None:
        """Of a chain of `offered` drafts the first `accepted` were right."""
        trials = accepted + (accepted < offered)
        self._hits = DECAY * self._hits + accepted
        self._trials = DECAY * self._trials + trials

    @property
    def trust(self) -> float:
        """Of drafts whose drafter says how probable they are: how many were right, as a part of those that should have
        been."""
        return min(self._right / self._claimed, 1.0)

    def compare(self, claimed: float, is_right: bool) -> None:
        """A draft was said to have this probability."""
        self._right = FORGET * self._right + is_right
        self._claimed = FORGET * self._claimed + claimed

    def is_due(self, now: int) -> bool:
        """Whether no pause lasts.

        Args:
            now: the number of the pass, among those of the request; the first is 1.
        """
        return now > self._paused_until

    def paid(self, is_paid: bool, now: int) -> None:
        """Whether drafts paid in this pass. If not, there is a pause, each longer than the one before."""
        self.pauses = 0 if is_paid else min(self.pauses + 1, MAX_PAUSES)
        self._paused_until = 0 if is_paid else now + 4**self.pauses
        self._missed = 0

    def missed(self, now: int, were_computed: bool = False) -> None:
        """Drafts were asked for, as they were expected to pay, and none was worth a row; or all of them were not worth
        what it took to have them."""
        self._missed += 1
        if self.is_due(now) and ((self.pauses and not were_computed) or self._missed >= PATIENCE):
            self.paid(False, now)

    def count(self, limit: int, worth: Worth, now: int) -> int:
        """How many drafts to compute, of a drafter that takes time for each; at least one, to measure it.

        Args:
            limit: the most.
            worth: of the pass without them.
            now: as for `is_due`.
        """
        rate = self.rate
        count = worth.best([rate**ahead for ahead in range(1, limit + 1)])
        if not count:
            self.paid(False, now)
        return max(count, 1)
