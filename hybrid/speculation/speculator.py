"""What an engine asks for drafts: it chooses among drafters, and decides how many drafts are worth computing."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, takewhile
from operator import mul

from hybrid.cache.cache import HybridCache
from hybrid.errors import ArgumentError
from hybrid.interrupts import is_for_the_process
from hybrid.speculation.cached import NOTHING, CachedDrafter, ContinuationDrafter, GramDrafter
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.drafts import Drafts, checked
from hybrid.speculation.joined import Asked, Joined, Known
from hybrid.speculation.pace import MAX_WEIGHT, Acceptance, PassCost, Worth, is_common

log: logging.Logger = logging.getLogger(__name__)

FIRST_CHAIN = 6
"""Tokens of a chain that are asked for, at least; and twice as many as the latest one had."""


@dataclass
class DrafterStats:
    """What a drafter has done since the engine was made.

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
        cost: of passes.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        max_rows: int | None = None,
    ) -> None:
        self._config = config
        self._max_rows = max_rows
        self._clock = clock
        self._cached = tuple([drafter for drafter in drafters if isinstance(drafter, CachedDrafter)])
        first = [*takewhile(lambda drafter: isinstance(drafter, CachedDrafter), drafters)]
        self._first = self._cached[: len(first)]
        self._all = tuple(map(Asked.of, drafters))
        self._others = self._all[len(first) :]
        self._vocab_size = vocab_size
        self._stats = {asked.name: DrafterStats() for asked in self._all}
        self._expected = {asked.name: Acceptance(asked.drafter.prior) for asked in self._all}
        self._pauses = dict.fromkeys(self._stats, 0)
        self._known: dict[History, Known] = {}
        self.cost: PassCost = PassCost()
        self._gain = 1.0  # tokens per second with drafts, of those without, lately
        self._pays = True  # the drafts of the pass, with what it took to have them
        self._leaves_out = False  # they pay, and are not computed for once
        self._spent = 0.0
        self._spent_each = 0.0  # for each pass that was computed since, and in it

    @property
    def spent(self) -> float:
        """Seconds for which drafters have computed, for the latest pass."""
        return self._spent

    @property
    def is_adaptive(self) -> bool:
        """Whether as many drafts are computed as pay; else as many as there are."""
        return self._config.adaptive

    @property
    def max_drafts(self) -> int:
        """Number of drafts of one request in one pass, at most."""
        return self._config.max_drafts

    @property
    def stats(self) -> dict[str, DrafterStats]:
        """What each drafter has done, by its name."""
        return {name: replace(stats) for name, stats in self._stats.items()}

    def propose(self, history: History, limit: int, rows: int) -> Drafts | None:
        """Drafts for a request; None: it has none, or they would not pay.

        Args:
            limit: the most drafts.
            rows: rows of the pass without them.
        """
        return self.propose_all([(history, limit)], rows)[0]

    def propose_all(self, asked: Sequence[tuple[History, int]], rows: int) -> list[Drafts | None]:
        """Drafts for the requests of a pass; None for a request that has none, or whose drafts would not pay.

        Args:
            asked: histories, each with the most drafts that it may have.
            rows: rows of the pass without drafts.
        """
        trees, most = list[Joined](), self._config.max_drafts
        self._spent = self._spent_each = 0.0
        for history, limit in asked:
            known = self._known.get(history) or self._begin(history)
            known.passes = now = known.passes + 1
            if known.is_left_out(now) and self._config.adaptive:
                continue
            known.asked = now
            if known.watched:
                self._compare(history, known)
            joined = self._of_cached(history, min(limit, most), known, trees, rows)
            if joined is not None:
                trees.append(joined)
        for drafter in self._others if trees else ():
            self._join(drafter, trees, rows)
        found = [joined for joined in trees if not joined.tree.is_empty]
        if not found:
            return [None] * len(asked)
        drafts: dict[History, Drafts] = {}
        for joined, count in zip(found, self._counts(found, rows), strict=True):
            joined.count = count
            if count:
                joined.known.found = joined.known.passes
            self._judge(joined)
            if count:
                drafts[joined.history] = joined.tree.best(count)
        return [drafts.get(history) for history, _ in asked]

    def has_none(self, histories: Sequence[History]) -> bool:
        """Whether a pass can do without drafts though the tokens of the one under way are not known: no source has more
        than these, so that drafts would pay, and no other drafter is to be asked. Then it counts as one without drafts.

        Args:
            histories: of the requests of the pass, up to the token that is not known.
        """
        chances: list[float] = []
        looked: list[tuple[Known, bool, bool]] = []
        for history in histories:
            known = self._known.get(history) or self._begin(history)
            is_asked = not (self._config.adaptive and known.is_left_out(known.passes + 1))
            for asked in self._others if is_asked else ():
                is_due = not self._config.adaptive or known.measured[asked.name].is_due(known.passes + 1)
                if is_due and asked.cached is None:
                    return False
            drafts = None
            for drafter in self._cached if is_asked else ():
                drafts = drafts or self._ask_cached(drafter, history, self._config.max_drafts)
            own = [*accumulate(drafts.chances or (), mul)][1:] if drafts is not None else []
            chances += own  # of those after the token that is not known
            looked.append((known, is_asked, bool(own)))
        if chances:
            chances.sort(reverse=True)
            rows = len(histories)
            if not self._config.adaptive or self.cost.worth(rows).best(chances):
                return False
            if self.cost.is_doubted(rows, chances[0]):
                return False
        self._spent = 0.0
        for known, is_asked, has_drafts in looked:
            known.passes += 1
            known.asked = known.passes if is_asked else known.asked
            known.found = known.passes if has_drafts else known.found
        return True

    def _begin(self, history: History) -> Known:
        """A request of which nothing is known."""
        expected = self._expected.items()
        measured = {name: Acceptance(own.rate, self._pauses[name], own.trust) for name, own in expected}
        return self._known.setdefault(history, Known(measured))

    def _compare(self, history: History, known: Known) -> None:
        """Compare drafts with what came."""
        if known.position < len(history.ids):
            came = history.ids[known.position]
            for name, (token, claimed) in known.watched.items():
                for measured in (self._expected[name], known.measured[name]):
                    if claimed is None:
                        measured.observe(1, token == came)
                    else:
                        measured.compare(claimed, token == came)
            known.watched = {}

    def _counts(self, trees: Sequence[Joined], rows: int) -> list[int]:
        """How many drafts of each request are computed: the most probable of all, as long as they pay."""
        if not self._config.adaptive:
            return [min(joined.limit, len(joined.tree)) for joined in trees]
        each = [joined.tree.chances[: joined.limit] for joined in trees]
        every = each[0] if len(each) == 1 else sorted(chain.from_iterable(each), reverse=True)
        if self._max_rows is not None:
            every = every[: max(self._max_rows - rows, 0)]
        worth = self.cost.worth(rows)
        best = worth.best(every)
        count = self.cost.chosen(rows, best) if best else 0
        self._leaves_out = best > 0 and count == 0
        if count:
            gain = worth.gain(every[:count], self._spent_each)
            self._pays = gain > 1.0
            self._gain += (max(gain, 1.0) - self._gain) / MAX_WEIGHT
        elif every and not best and self.cost.is_doubted(rows, every[0]):
            count = next((count for count in range(1, len(every)) if is_common(rows + count)), len(every))
        if len(each) == 1:
            return [count]
        ranked = sorted([(-chance, at) for at, own in enumerate(each) for chance in own])[:count]
        taken = Counter(at for _, at in ranked)
        return [taken[at] for at in range(len(trees))]

    def _judge(self, joined: Joined) -> None:
        """Drafts of a request were looked at: whether they pay. Those that are not computed are compared with what
        comes, where their drafter does not do that itself."""
        known = joined.known
        for name, computes in joined.asked.items() if not self._leaves_out else ():
            own = known.measured[name]
            is_paid = joined.count > 0 and (self._pays or not computes)
            if is_paid or not computes:
                own.paid(is_paid, known.passes)
            else:
                own.missed(known.passes, joined.count > 0)
            self._pauses[name] = own.pauses
        known.position = len(joined.history.ids)
        known.watched = {  # what was computed of drafters that say nothing is counted when it is verified
            name: first for name, first in joined.firsts.items() if first[1] is not None or not joined.count
        }

    def _of_cached(
        self, history: History, limit: int, known: Known, trees: Sequence[Joined], rows: int
    ) -> Joined | None:
        """What those drafters propose that come first and know tokens that were computed before. None: nothing, and
        no others are to be asked."""
        others = [asked for asked in self._others if known.measured[asked.name].is_due(known.passes)]
        joined = Joined(history, limit, known) if others or (self._others and not self._config.adaptive) else None
        for drafter in self._first:
            if joined is not None and not joined.tree.is_empty and self._config.adaptive:
                worth = self.cost.worth(_rows_besides(joined, trees, rows))
                if not _pays(joined, known.measured[drafter.name].rate, worth):
                    continue
            drafts = self._ask_cached(drafter, history, limit)
            if drafts is not None:
                joined = joined or Joined(history, limit, known)
                self._add(drafter.name, joined, drafts)
        return joined

    def _join(self, asked: Asked, trees: Sequence[Joined], rows: int) -> None:
        """Add what a drafter proposes, where it is worth asking."""
        wanted: list[tuple[Joined, int]] = []
        for joined in trees:
            count = joined.limit
            if self._config.adaptive:
                own = joined.known.measured[asked.name]
                if not own.is_due(joined.known.passes):
                    continue
                if asked.computes or not joined.tree.is_empty:
                    count = self._worth_asking(asked, joined, own, trees, rows)
            if count > 0:
                wanted.append((joined, count))
        longest, seconds = 1, 0.0
        if asked.chain is not None and self._config.adaptive:
            asked.chain.least = self._gain * self.cost.least(rows, asked.name)
        if asked.computes and wanted:
            found = self._prepare(asked, [(joined.history, count) for joined, count in wanted])
            if found is None:
                return
            seconds = found
        for joined, count in wanted:
            if asked.cached is not None:
                drafts = self._ask_cached(asked.cached, joined.history, count)
                if drafts is not None:
                    self._add(asked.name, joined, drafts)
                continue
            drafts = self._ask(asked, joined.history, count, joined.limit)
            if drafts is not None:
                claimed = drafts.chances[0] if drafts.chances is not None else None
                joined.firsts[asked.name] = drafts.tokens[0], claimed
                if asked.computes or claimed is None:
                    joined.asked[asked.name] = asked.computes
                longest = max(longest, drafts.depth)
                joined.known.measured[asked.name].longest = drafts.depth
                self._add(asked.name, joined, drafts.scaled(joined.known.measured[asked.name].trust))
        if asked.computes and wanted:
            self.cost.drafted(asked.name, longest, seconds)

    def _add(self, drafter: str, joined: Joined, drafts: Drafts) -> None:
        """Add drafts of a drafter to those of a request."""
        rate = joined.known.measured[drafter].rate
        joined.tree.add(drafts, rate)
        joined.left *= 1 - (rate if drafts.chances is None else drafts.chances[0])
        joined.count = min(joined.limit, len(joined.tree))

    def _worth_asking(self, asked: Asked, joined: Joined, own: Acceptance, trees: Sequence[Joined], rows: int) -> int:
        """How many drafts to ask a drafter for that takes time for each, or where others have some; 0: for none."""
        if asked.chain is None or not joined.tree.is_empty:
            drafting = self.cost.drafting(asked.name) / len(trees)
            worth = self.cost.worth(_rows_besides(joined, trees, rows), drafting)
            if not joined.tree.is_empty and not _pays(joined, own.rate, worth):
                return 0
        count = joined.limit
        if asked.chain is not None:  # it ends a chain itself
            return min(max(2 * own.longest, FIRST_CHAIN), count)
        if asked.computes and count > 0:
            count = own.count(count, worth, joined.known.passes)
        joined.count = max(joined.count, count)
        return count

    def _prepare(self, asked: Asked, wanted: Sequence[tuple[History, int]]) -> float | None:
        """Let a drafter compute what it will be asked for, and return its seconds. None: it failed, and none of it is
        there."""
        started = self._clock()
        try:
            asked.drafter.prepare(wanted)
        except BaseException as error:
            if is_for_the_process(error):
                raise
            for history, _ in wanted:
                self._refuse(asked.name, history, error)
            return None
        seconds = self._clock() - started
        self._spent += seconds
        chain = asked.chain
        self._spent_each += seconds / chain.passes_before + chain.each_before if chain is not None else seconds
        return seconds + (chain.seconds_before if chain is not None else 0.0)

    def following(self, history: History, drafts: Drafts, limit: int) -> Sequence[int]:
        """Tokens of which these drafts of a request are the first, in the source that all of them are from; empty:
        there is no such one."""
        name = drafts.drafter
        for drafter in self._cached:
            source = drafter.source(history) if drafter.name == name else None
            if source is not None and source.start == len(history.ids):
                return source.tokens(limit)
        return ()

    def beyond(self, history: History, ids: array[int], limit: int) -> Sequence[int]:
        """What may follow in a source, where a request will have these tokens; empty: none is known."""
        for drafter in [drafter for drafter in self._cached if isinstance(drafter, GramDrafter)]:
            try:
                return drafter.beyond(history, ids, limit)
            except Exception as error:
                self._refuse(drafter.name, history, error)
        return ()

    def verified(self, history: History, drafts: Drafts, path: Sequence[int]) -> None:
        """Drafts of a request were computed, and those of `path` were accepted."""
        proposed, known = drafts.drafters, self._known.get(history)
        alone = drafts.drafter
        for name in (alone,) if alone is not None else {*chain.from_iterable(proposed)}:
            stats = self._stats[name]
            stats.proposals += 1
            stats.drafted_tokens += len(proposed) if alone else sum([name in names for names in proposed])
            stats.accepted_tokens += len(path) if alone else sum([name in proposed[at] for at in path])
            offered, accepted = drafts.trials(name, path)
            self._expected[name].observe(offered, accepted)
            if known is not None:
                known.measured[name].observe(offered, accepted)

    def timed(self, rows: int, seconds: float, drafts: int = 0) -> None:
        """A pass without prompts was computed; some of its rows were drafts."""
        self.cost.observe(rows, seconds, drafts)

    def end(self, history: History) -> None:
        """A request has ended."""
        if self._known.pop(history, None) is not None:
            self._tell_all(lambda drafter: drafter.end(history))

    def clear(self) -> None:
        """The cache was cleared: drafters forget the tokens of requests that have ended."""
        self._tell_all(lambda drafter: drafter.clear())

    def _tell_all(self, call: Callable[[Drafter], None]) -> None:
        """Call every drafter, whatever others do."""
        for asked in self._all:
            try:
                call(asked.drafter)
            except BaseException as error:
                if is_for_the_process(error):
                    raise
                self._count_refusal(asked.name, error)

    def _ask(self, asked: Asked, history: History, count: int, limit: int) -> Drafts | None:
        """What a drafter proposes. If that fails, it is as if it had proposed nothing.

        Args:
            count: how many tokens are wanted; of a drafter that says how probable they are, `limit` may be chosen from.
        """
        name = asked.name
        try:
            proposed = asked.drafter.propose(history, count)
            if not isinstance(proposed, tuple) or len(proposed) not in (2, 3):
                raise ArgumentError(f"drafter {name}: propose must return (tokens, parents), got {proposed!r}")
            tokens, parents, *chances = proposed
            if asked.chain is not None and isinstance(parents, range):  # it is known, and needs no check
                return Drafts.chain(tokens, name, chances[0]) if tokens else None
            drafts = checked(tokens, parents, name, limit if chances else count, self._vocab_size, *chances)
        except BaseException as error:
            if is_for_the_process(error):
                raise
            self._refuse(asked.name, history, error)
            return None
        return drafts if len(drafts) else None

    def _ask_cached(self, drafter: CachedDrafter, history: History, limit: int) -> Drafts | None:
        """The same for tokens that were computed before, which need no check. They may be none: an image follows."""
        try:
            proposed = drafter.propose(history, limit)
        except Exception as error:
            self._refuse(drafter.name, history, error)
            return None
        if proposed is NOTHING or not proposed[0]:  # the usual case
            return None
        return Drafts.chain(proposed[0], drafter.name, proposed[2])

    def _refuse(self, name: str, history: History, error: BaseException) -> None:
        """What a drafter did is as if its draft had been wrong."""
        known = self._known[history]
        known.measured[name].observe(1, 0)
        known.measured[name].paid(False, known.passes)
        self._count_refusal(name, error)

    def _count_refusal(self, name: str, error: BaseException) -> None:
        stats = self._stats[name]
        if not stats.refused:
            log.warning("drafts are refused: %s: %s", type(error).__name__, error)
        stats.refused += 1


def _rows_besides(joined: Joined, trees: Sequence[Joined], rows: int) -> int:
    """Rows of a pass without the drafts of one request, as far as the others are known."""
    return rows + sum(other.count for other in trees) - joined.count


def _pays(joined: Joined, rate: float, worth: Worth) -> bool:
    """Whether a draft that is right where the others are not would be computed in addition to these, or in place of
    one."""
    chances, chance = joined.tree.chances[: joined.limit], joined.left * rate
    return worth.pays(chance, chances) and (len(chances) < joined.limit or chance > chances[-1])


def make_speculator(
    config: SpeculationConfig | None,
    cache: HybridCache,
    vocab_size: int,
    mtp: Drafter | None = None,
    clock: Callable[[], float] = time.perf_counter,
    max_rows: int | None = None,
) -> Speculator | None:
    """The drafts that a configuration asks for; None: it asks for none.

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
