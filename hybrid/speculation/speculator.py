"""What an engine asks for drafts: it chooses among drafters, and decides how many drafts are worth computing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid.cache.cache import HybridCache
from hybrid.errors import ArgumentError
from hybrid.speculation.cached import ContinuationDrafter, GramDrafter
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.draft_tree import DraftTree
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.drafts import Drafts, checked
from hybrid.speculation.pace import Acceptance, PassCost, Worth

log: logging.Logger = logging.getLogger(__name__)


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
    """

    def __init__(self, config: SpeculationConfig, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self._config = config
        self._drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self._stats = {drafter.name: DrafterStats() for drafter in self._drafters}
        self._expected = {drafter.name: Acceptance(min(max(drafter.prior, 0.0), 1.0)) for drafter in self._drafters}
        self._own: dict[History, dict[str, Acceptance]] = {}
        self._cost = PassCost()

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
        own = self._own.get(history)
        if own is None:
            own = {name: Acceptance(expected.rate) for name, expected in self._expected.items()}
            self._own[history] = own
        limit, share, joined, left = min(limit, self._config.max_drafts), self._cost.share, DraftTree(), 1.0
        for drafter in self._drafters:
            count, rate = limit, own[drafter.name].rate
            if self._config.adaptive:
                if len(joined) and not self._pays(joined, left * rate, limit, Worth(rows, share)):
                    continue
                count = own[drafter.name].count(limit, rows, share)
            drafts = self._ask(drafter, history, count) if count > 0 else None
            if drafts is not None:
                joined.add(drafts, rate)
                left *= 1 - rate
        if not len(joined):
            return None
        most = limit
        if self._config.adaptive and joined.is_mixed:
            most = max(1, Worth(rows, share).take(joined.chances[:limit]))
        return joined.best(most)

    @staticmethod
    def _pays(joined: DraftTree, chance: float, limit: int, worth: Worth) -> bool:
        """Whether another draft with this chance would be computed in addition to these, or in place of one."""
        chances = joined.chances
        worth.take(chances)
        return worth.pays(chance) and (len(chances) < limit or chance > chances[limit - 1])

    def verified(self, history: History, drafts: Drafts, path: Sequence[int]) -> None:
        """Drafts of a request were computed, and those of `path` were accepted."""
        for name in dict.fromkeys(name for names in drafts.drafters for name in names):
            stats = self._stats[name]
            stats.proposals += 1
            stats.drafted_tokens += sum(name in names for names in drafts.drafters)
            stats.accepted_tokens += sum(name in drafts.drafters[at] for at in path)
            offered, accepted = drafts.trials(name, path)
            for measured in (self._expected, self._own.get(history, {})):
                if name in measured:
                    measured[name].observe(offered, accepted)

    def timed(self, rows: int, seconds: float) -> None:
        """A pass without prompts was computed."""
        self._cost.observe(rows, seconds)

    def end(self, history: History) -> None:
        """A request has ended."""
        if self._own.pop(history, None) is not None:
            for drafter in self._drafters:
                drafter.end(history)

    def _ask(self, drafter: Drafter, history: History, count: int) -> Drafts | None:
        """What a drafter proposes. If that fails, it is as if it had proposed nothing."""
        stats = self._stats[drafter.name]
        try:
            proposed = drafter.propose(history, count)
            if not isinstance(proposed, tuple) or len(proposed) != 2:
                raise ArgumentError(f"drafter {drafter.name}: propose must return (tokens, parents), got {proposed!r}")
            drafts = checked(*proposed, drafter.name, count, self._vocab_size)
        except Exception as error:
            if not stats.refused:
                log.warning("drafts are refused: %s: %s", type(error).__name__, error)
            stats.refused += 1
            self._own[history][drafter.name].observe(1, 0)
            return None
        return drafts if len(drafts) else None


def make_speculator(config: SpeculationConfig | None, cache: HybridCache, vocab_size: int) -> Speculator | None:
    """The drafts that a configuration asks for; None: it asks for none.

    Raises:
        ArgumentError: two drafters have the same name.
    """
    if config is None:
        return None
    drafters: list[Drafter] = []
    for drafter in config.drafters:
        drafters += (ContinuationDrafter(cache.tree), GramDrafter()) if isinstance(drafter, str) else (drafter,)
    names = [drafter.name for drafter in drafters]
    if len(set(names)) < len(names):
        raise ArgumentError(f"SpeculationConfig: drafters must have different names, got {names}")
    return Speculator(config, drafters, vocab_size)
