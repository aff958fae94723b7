"""Drafts for an engine: chosen among drafters, as many as are worth computing.

The rule is one: drafts are worth computing while more tokens are accepted per second with them than without. How often
drafts are right is measured per request and drafter (`hybrid.speculation.acceptance`), what passes take per engine
(`PassTimes`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import mul

import numpy as np

from hybrid.cache.cache import HybridCache
from hybrid.errors import ArgumentError
from hybrid.interrupts import is_for_the_process
from hybrid.speculation.acceptance import Acceptance
from hybrid.speculation.cached import NOTHING, CachedDrafter, ContinuationDrafter, GramDrafter
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import ChainDrafter, Drafter, History
from hybrid.speculation.drafts import Drafts, DraftTree, checked

log: logging.Logger = logging.getLogger(__name__)

FORGET = 0.98
"""Weight of an earlier pass in the measured times, for each pass that was timed since."""

FIRST_SHARE = 0.1
"""Expected cost of a row, and of verifying drafts, as a part of a pass without rows."""

PRIOR = 0.1
"""Passes that this expectation counts as."""

KNOWN = 0.5
"""Passes without drafts, as they count, that are needed to know what drafts save."""

MIN_SHARE = 0.01
"""The least cost of a row that is believed, as such a part."""

MOST_SLOW = 2.0
"""A pass counts as this many times its expected seconds at most: a slower one was interrupted."""

CAPTURED = 2
"""Passes with drafts of a number of rows that are not timed: the first one is captured, and then its replay."""

ENOUGH = 0.75
"""Chance of a draft beyond which no other drafter is asked."""

FIRST_CHAIN = 6
"""Tokens of a chain that are asked for, at least; and twice as many as were accepted of the latest one."""

FRUITLESS, ASKED_EVERY = 16, 4
"""After this many passes in which no draft of a request was computed, drafters are asked in every fourth pass."""

FOLLOW = 0.1
"""Weight of the latest value in a running mean."""


def clock_of(device_type: str) -> Callable[[], float]:
    """Return the clock for passes and drafters, in seconds. A CPU computes in the calling thread, whose own time does
    not depend on what else the machine does."""
    return time.thread_time if device_type == "cpu" else time.perf_counter


def is_common(rows: int) -> bool:
    """Return whether passes of this many rows are computed. Passes are captured for each number of rows, which takes as
    long as many passes: there are to be few such numbers. (Others are computed where no such number would pay.)"""
    doublings = (rows - 1).bit_length() - 2  # two numbers from one power of two to the next, up to 64
    return rows % (1 << min(max(doublings, 0), 4)) == 0


class PassTimes:
    """Seconds of passes without prompts: `base + row * rows`, and `extra` where some rows are drafts.

    Least squares over the latest passes and what is expected at first. So what was measured long ago is forgotten:
    drafts that did not pay on a busy machine are tried again.

    Attributes:
        base, row, extra: as above.
    """

    def __init__(self) -> None:
        self.base: float = 1.0
        self.row: float = FIRST_SHARE
        self.extra: float = FIRST_SHARE
        self._seen: Counter[tuple[int, bool]] = Counter()
        row, extra = np.array((-4 * FIRST_SHARE, 4.0, 0.0)), np.array((-FIRST_SHARE, 0.0, 1.0))  # 0 where it is so
        self._expected = PRIOR * (np.outer(row, row) + np.outer(extra, extra))
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)

    @property
    def knows_plain(self) -> bool:
        """Tell whether a pass without drafts was timed lately: else it would be believed for ever that drafts pay."""
        return bool(self._squares[0, 0] - self._squares[0, 2] >= KNOWN)

    def of(self, rows: int, has_drafts: bool) -> float:
        """Return the expected seconds of a pass."""
        return self.base + self.row * rows + self.extra * has_drafts

    def observe(self, rows: int, seconds: float, has_drafts: bool) -> None:
        """Learn that a pass took so long."""
        kind = rows, has_drafts
        self._seen[kind] += 1
        if self._seen[kind] <= (CAPTURED if has_drafts else 1):
            return
        if self._squares[0, 0]:
            seconds = min(seconds, MOST_SLOW * self.of(rows, has_drafts))
        numbers = np.array((1.0, rows, has_drafts))
        self._squares = FORGET * self._squares + np.outer(numbers, numbers)
        self._products = FORGET * self._products + seconds * numbers
        base, row, extra = np.linalg.solve(self._squares + self._expected, self._products).tolist()
        least = MIN_SHARE * max(base, seconds)
        self.base, self.row, self.extra = max(base, least), max(row, least), max(extra, 0.0)

    def best(self, rows: int, chances: Sequence[float]) -> int:
        """Return the number of drafts with which most tokens per second are accepted.

        Args:
            rows: rows of the pass without drafts, each of which yields a token.
            chances: that each draft is accepted, falling.
        """
        best, most = 0, rows / self.of(rows, False)
        expected, seconds, row = float(rows), self.of(rows, True), self.row
        for count, chance in enumerate(chances, 1):
            expected, seconds = expected + chance, seconds + row
            if chance * seconds <= expected * row and expected <= most * seconds:  # from here on fewer and fewer
                break
            is_allowed = is_common(rows + count) or (count == len(chances) and not best)
            if is_allowed and expected > most * seconds:
                best, most = count, expected / seconds
        return best


@dataclass
class DrafterStats:
    """Counts of a drafter since the engine was made.

    Attributes:
        proposals: times that it had a draft that was computed.
        drafted_tokens: drafts that were computed.
        accepted_tokens: drafts that were what came next.
        refused: times that it raised an exception, or returned something that cannot be computed.
    """

    proposals: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    refused: int = 0

    def __add__(self, other: DrafterStats) -> DrafterStats:
        return DrafterStats(
            self.proposals + other.proposals,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
            self.refused + other.refused,
        )


class _Asked:
    """A drafter with what follows from its type, and what is known of it from all requests."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.computes = type(drafter).prepare is not Drafter.prepare  # for several requests together
        self.chain = drafter if isinstance(drafter, ChainDrafter) else None
        self.cached = drafter if isinstance(drafter, CachedDrafter) else None
        self.stats = DrafterStats()
        self.expected = Acceptance(drafter.prior)
        self.says_chances = self.cached is not None
        self.seconds = 0.0  # in which it computes a draft for each of several requests; 0: it is not known

    def took(self, seconds: float) -> None:
        """Learn in which time it has computed a draft for each of several requests."""
        if not self.seconds or seconds < self.seconds / 2:  # captures came before
            self.seconds = seconds
        self.seconds += FOLLOW * (min(seconds, 2 * self.seconds) - self.seconds)


@dataclass(eq=False, slots=True)
class _Known:
    """Knowledge of a request.

    Attributes:
        acceptance: of each drafter that does not learn itself how probable its drafts are.
        position: where the tokens of `watched` would be.
        watched: drafters, a token that each has proposed, and the probability that it gave (None: it does not say).
        passes: number of the latest pass.
        asked, found: of the latest one in which drafters were asked, and in which drafts of theirs were computed.
    """

    acceptance: dict[str, Acceptance]
    position: int = 0
    watched: list[tuple[_Asked, int, float | None]] = field(default_factory=list)
    passes: int = 0
    asked: int = 0
    found: int = 0

    def should_skip(self, now: int) -> bool:
        """Return whether no drafter is asked in this pass: of those in which none would be computed, most are left
        out."""
        return now - self.found > FRUITLESS and now - self.asked < ASKED_EVERY

    def compare(self, ids: Sequence[int]) -> None:
        """Compare drafts with what came."""
        if self.position >= len(ids):
            return
        for asked, token, claimed in self.watched:
            is_right, own = token == ids[self.position], self.acceptance[asked.name]
            for acceptance in (asked.expected, own):
                acceptance.observe(1.0 if claimed is None else claimed, is_right)
            if is_right and not asked.computes:
                own.was_worth(True, self.passes)
        self.watched = []


@dataclass(eq=False, slots=True)
class _Tree:
    """Proposals for a request in one pass.

    Attributes:
        limit: the most drafts.
        firsts: of each drafter in `_Known.acceptance` the first draft, and the probability that it gave.
    """

    history: History
    limit: int
    known: _Known
    drafts: DraftTree = field(default_factory=DraftTree)
    firsts: list[tuple[_Asked, int, float | None]] = field(default_factory=list)


class Speculator:
    """The drafts of one engine.

    Args:
        config: how much is drafted.
        drafters: who drafts, in the order in which they are asked.
        vocab_size: of the model.
        clock: seconds, by which drafters are timed.
        max_rows: rows of a pass beyond which one more costs more than those before, if there is such a number: with
            drafts that are chosen by what they cost it has no more.

    Attributes:
        times: of passes.
        spent: seconds for which drafters have computed, for the latest pass.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        max_rows: int | None = None,
    ) -> None:
        self.times: PassTimes = PassTimes()
        self.spent: float = 0.0
        self._config = config
        self._max_rows = max_rows
        self._clock = clock
        self._drafters = {drafter.name: _Asked(drafter) for drafter in drafters}
        self._vocab_size = vocab_size
        self._known: dict[History, _Known] = {}
        self._gain = 1.0  # tokens per second with drafts, of those without, lately

    @property
    def is_adaptive(self) -> bool:
        """Tell whether as many drafts are computed as save time; else as many as there are."""
        return self._config.adaptive

    @property
    def stats(self) -> dict[str, DrafterStats]:
        """Counts of each drafter, by its name."""
        return {name: asked.stats + DrafterStats() for name, asked in self._drafters.items()}

    def propose(self, history: History, limit: int, rows: int) -> Drafts | None:
        """Return drafts for a request; None: it has none, or they are not worth computing.

        Args:
            limit: the most drafts.
            rows: rows of the pass without them.
        """
        return self.propose_all([(history, limit)], rows)[0]

    def propose_all(self, asked: Sequence[tuple[History, int]], rows: int) -> list[Drafts | None]:
        """Return drafts for the requests of a pass; None for a request that has none, or whose are not worth computing.

        Args:
            asked: histories, each with the most drafts that it may have.
            rows: rows of the pass without drafts.
        """
        trees: list[_Tree] = []
        self.spent = 0.0
        for history, limit in asked:
            known = self._known.get(history) or self._begin(history)
            known.passes = now = known.passes + 1
            if self._config.adaptive and known.should_skip(now):
                continue
            known.asked = now
            if known.watched:
                known.compare(history.ids)
            trees.append(_Tree(history, min(limit, self._config.max_drafts), known))
        for drafter in self._drafters.values() if trees else ():
            self._join(drafter, trees, rows)
        found = [tree for tree in trees if not tree.drafts.is_empty]
        if not found:
            return [None] * len(asked)
        drafts: dict[History, Drafts] = {}
        for tree, count in zip(found, self._counts(found, rows), strict=True):
            known = tree.known
            known.position = len(tree.history.ids)
            # what is computed of drafters that say nothing is counted when it is verified
            known.watched = [first for first in tree.firsts if first[2] is not None or not count]
            if count:
                known.found = known.passes
                drafts[tree.history] = tree.drafts.best(count)
        return [drafts.get(history) for history, _ in asked]

    def has_none(self, histories: Sequence[History]) -> bool:
        """Return whether a pass can do without drafts though the tokens of the one under way are not known: no source
        has more than these, so that drafts would be worth it, and no other drafter is to be asked. Then it counts as
        one without drafts.

        Args:
            histories: of the requests of the pass, up to the token that is not known.
        """
        chances: list[float] = []
        looked: list[tuple[_Known, bool, bool]] = []
        for history in histories:
            known = self._known.get(history) or self._begin(history)
            is_asked = not (self._config.adaptive and known.should_skip(known.passes + 1))
            drafts = None
            for asked in self._drafters.values() if is_asked else ():
                if asked.cached is not None:
                    drafts = drafts or self._ask_cached(asked, asked.cached, history, self._config.max_drafts)
                elif not self._config.adaptive or known.acceptance[asked.name].should_ask(known.passes + 1):
                    return False
            own = [*accumulate(drafts.chances or (), mul)][1:] if drafts is not None else []
            chances += own  # of those after the token that is not known
            looked.append((known, is_asked, bool(own)))
        if chances:
            chances.sort(reverse=True)
            if not self._config.adaptive or self.times.best(len(histories), chances):
                return False
        self.spent = 0.0
        for known, is_asked, has_drafts in looked:
            known.passes += 1
            known.asked = known.passes if is_asked else known.asked
            known.found = known.passes if has_drafts else known.found
        return True

    def _begin(self, history: History) -> _Known:
        """Begin with a request, of which as much is expected as of those before."""
        acceptance = {
            name: Acceptance(asked.expected.rate, asked.expected.misses)
            for name, asked in self._drafters.items()
            if asked.cached is None
        }
        return self._known.setdefault(history, _Known(acceptance))

    def _counts(self, trees: Sequence[_Tree], rows: int) -> list[int]:
        """Return how many drafts of each request are computed: the most probable of all, as long as they raise the
        tokens per second."""
        if not self._config.adaptive:
            return [min(tree.limit, len(tree.drafts)) for tree in trees]
        each = [tree.drafts.chances[: tree.limit] for tree in trees]
        every = each[0] if len(each) == 1 else sorted(chain.from_iterable(each), reverse=True)
        if self._max_rows is not None:
            every = every[: max(self._max_rows - rows, 0)]
        count, gain = self.times.best(rows, every), 1.0
        if count and not self.times.knows_plain:
            return [0] * len(trees)
        if count:
            seconds = self.times.of(rows + count, True) + self.spent
            gain = (rows + sum(every[:count])) * self.times.of(rows, False) / (rows * seconds)
            self._gain += FOLLOW * (max(gain, 1.0) - self._gain)
        counts = [count]
        if len(each) > 1:
            ranked = sorted([(-chance, at) for at, own in enumerate(each) for chance in own])[:count]
            taken = Counter(at for _, at in ranked)
            counts = [taken[at] for at in range(len(trees))]
        for tree, own_count in zip(trees, counts, strict=True):
            for asked, _, _ in tree.firsts:
                self._judge(asked, tree.known, own_count > 0 and (gain > 1.0 or not asked.computes))
        return counts

    def _judge(self, asked: _Asked, known: _Known, is_worth: bool) -> None:
        """Record whether what a drafter has proposed for a request is worth computing, and what it took to have it."""
        own = known.acceptance[asked.name]
        own.was_worth(is_worth, known.passes)
        asked.expected.misses = own.misses

    def _join(self, asked: _Asked, trees: Sequence[_Tree], rows: int) -> None:
        """Add what a drafter proposes, where it is worth asking."""
        wanted: list[tuple[_Tree, int]] = []
        for tree in trees:
            if self._config.adaptive:
                own = tree.known.acceptance.get(asked.name)
                if own is not None and not own.should_ask(tree.known.passes):
                    continue
                if not tree.drafts.is_empty and tree.drafts.chances[0] >= ENOUGH:
                    continue
            count = self._wanted(asked, tree, rows)
            if count > 0:
                wanted.append((tree, count))
        if not wanted:
            return
        longest, seconds = 1, self._prepare(asked, wanted, rows) if asked.computes else 0.0
        for tree, count in wanted:
            longest = max(longest, self._ask(asked, tree, count))
        if seconds:
            self.spent += seconds
            asked.took(seconds / longest)

    def _wanted(self, asked: _Asked, tree: _Tree, rows: int) -> int:
        """Return how many drafts to ask a drafter for: as many as it may have, where they take no time."""
        own = tree.known.acceptance.get(asked.name)
        if own is None or not asked.computes or not self._config.adaptive:
            return tree.limit
        if asked.chain is not None:  # it ends a chain itself
            return min(max(2 * own.longest, FIRST_CHAIN), tree.limit)
        chances = [own.rate**ahead for ahead in range(1, tree.limit + 1)]
        return min(max(self.times.best(rows, chances), 1), tree.limit)

    def _prepare(self, asked: _Asked, wanted: list[tuple[_Tree, int]], rows: int) -> float:
        """Let a drafter compute what it will be asked for, and return its seconds. If it fails it is asked for
        nothing."""
        if asked.chain is not None and self._config.adaptive:
            cost = self.times.row * rows + asked.seconds
            asked.chain.least = self._gain * cost / (self.times.base + self.times.row * rows)
        started = self._clock()
        try:
            asked.drafter.prepare([(tree.history, count) for tree, count in wanted])
        except BaseException as error:
            if is_for_the_process(error):
                raise
            for tree, _ in wanted:
                self._refuse(asked, tree.history, error)
            wanted.clear()
            return 0.0
        return self._clock() - started

    def _ask(self, asked: _Asked, tree: _Tree, count: int) -> int:
        """Add what a drafter proposes, and return how many tokens it has in a row. If that fails, it is as if it had
        proposed nothing.

        Args:
            count: how many tokens are wanted; of a drafter that says how probable they are, the best may be chosen.
        """
        if asked.cached is not None:
            drafts = self._ask_cached(asked, asked.cached, tree.history, count)
            if drafts is not None:
                tree.drafts.add(drafts, 1.0)
            return 0
        try:
            proposed = asked.drafter.propose(tree.history, count)
            if not isinstance(proposed, tuple) or len(proposed) not in (2, 3):
                raise ArgumentError(f"drafter {asked.name}: propose must return (tokens, parents), got {proposed!r}")
            tokens, parents, *chances = proposed
            if asked.chain is not None and isinstance(parents, range):  # it is known, and needs no check
                drafts = Drafts.chain(tokens, asked.name, chances[0])
            else:
                limit = tree.limit if chances else count
                drafts = checked(tokens, parents, asked.name, limit, self._vocab_size, *chances)
        except BaseException as error:
            if is_for_the_process(error):
                raise
            self._refuse(asked, tree.history, error)
            return 0
        if not drafts.tokens:
            return 0
        acceptance = tree.known.acceptance
        if drafts.chances is not None and not asked.says_chances:  # it is believed, at first
            asked.says_chances = True
            asked.expected = Acceptance(1.0)
            for known in self._known.values():
                known.acceptance[asked.name] = Acceptance(1.0)
        claimed, rate = drafts.chances[0] if drafts.chances is not None else None, acceptance[asked.name].rate
        tree.firsts.append((asked, drafts.tokens[0], claimed))
        tree.drafts.add(drafts.scaled(rate), rate)
        return drafts.depth

    def _ask_cached(self, asked: _Asked, drafter: CachedDrafter, history: History, limit: int) -> Drafts | None:
        """Return tokens that were computed before, which need no check. They may be none: an image follows."""
        try:
            proposed = drafter.propose(history, limit)
        except Exception as error:
            self._refuse(asked, history, error)
            return None
        if proposed is NOTHING or not proposed[0]:  # the usual case
            return None
        return Drafts.chain(proposed[0], asked.name, proposed[2])

    def verified(self, history: History, drafts: Drafts, path: Sequence[int]) -> None:
        """Learn that drafts of a request were computed, and that those of `path` were accepted."""
        known, alone = self._known.get(history), drafts.drafter
        for name in (alone,) if alone is not None else {*chain.from_iterable(drafts.drafters)}:
            asked = self._drafters[name]
            stats, count = asked.stats, len(path)
            stats.proposals += 1
            if alone is not None:
                stats.drafted_tokens += len(drafts.tokens)
            else:
                stats.drafted_tokens += sum([name in names for names in drafts.drafters])
                count = sum([name in drafts.drafters[at] for at in path])
            stats.accepted_tokens += count
            if asked.cached is not None or known is None:
                continue
            own = known.acceptance[name]
            own.longest = count
            if not asked.says_chances:
                offered, accepted = drafts.trials(name, path)
                for acceptance in (asked.expected, own):
                    acceptance.observe(offered, accepted)

    def timed(self, rows: int, seconds: float, drafts: int = 0) -> None:
        """Learn what a pass without prompts took; some of its rows were drafts."""
        self.times.observe(rows, seconds, drafts > 0)

    def end(self, history: History) -> None:
        """Forget a request, which has ended."""
        if self._known.pop(history, None) is not None:
            self._tell_all(lambda drafter: drafter.end(history))

    def clear(self) -> None:
        """Have drafters forget the tokens of requests that have ended: the cache was cleared."""
        self._tell_all(lambda drafter: drafter.clear())

    def _tell_all(self, call: Callable[[Drafter], None]) -> None:
        """Call every drafter, whatever others do."""
        for asked in self._drafters.values():
            try:
                call(asked.drafter)
            except BaseException as error:
                if is_for_the_process(error):
                    raise
                self._count_refusal(asked, error)

    def _refuse(self, asked: _Asked, history: History, error: BaseException) -> None:
        """Count what a drafter did as a draft that was wrong."""
        known = self._known[history]
        if asked.name in known.acceptance:
            known.acceptance[asked.name].observe(1, 0)
            self._judge(asked, known, False)
        self._count_refusal(asked, error)

    def _count_refusal(self, asked: _Asked, error: BaseException) -> None:
        if not asked.stats.refused:
            log.warning(
                "the drafter %s gives no drafts that can be used, and answers are computed without those: %s: %s",
                asked.name,
                type(error).__name__,
                error,
            )
        asked.stats.refused += 1


def make_speculator(
    config: SpeculationConfig | None,
    cache: HybridCache,
    vocab_size: int,
    mtp: Drafter | None = None,
    clock: Callable[[], float] = time.perf_counter,
    max_rows: int | None = None,
) -> Speculator | None:
    """Make the drafts that a configuration asks for; None: it asks for none.

    Args:
        mtp: drafts with the model's own predictor; None: it has none here. It is asked after the others, which cost
            less.
        clock, max_rows: as `Speculator` has them.

    Raises:
        ArgumentError: two drafters have the same name, or there is no predictor.
    """
    if config is None:
        return None
    drafters: list[Drafter] = []
    for drafter in config.drafters:
        if isinstance(drafter, Drafter):
            drafters.append(drafter)
        elif drafter == "cache":
            drafters += (ContinuationDrafter(lambda: cache.tree), GramDrafter())
        elif mtp is None:
            raise ArgumentError(
                "speculation 'mtp' needs the predictor of a checkpoint: this one has none (tensors mtp.*), or it was "
                "not loaded, which Engine.from_pretrained(..., speculation='mtp') does; else use speculation='cache'"
            )
        else:
            drafters.append(mtp)
    names = [drafter.name for drafter in drafters]
    if len(set(names)) < len(names):
        raise ArgumentError(f"SpeculationConfig: drafters must have different names, got {names}")
    own = Speculator(config, sorted(drafters, key=lambda drafter: drafter is mtp), vocab_size, clock, max_rows)
    cache.on_clear.add(own)
    return own
