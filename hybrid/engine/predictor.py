"""Drafts of a checkpoint's own predictor, for all requests of a step together.

The predictor is computed between two passes of the model: it reads the last hidden state of each request from the
request's state slot, and its keys and values from the request's pages, where every pass of the model writes them along.
Those that it writes itself, in the places of its drafts, are overwritten by the pass that verifies them; what is after
the accepted ones is never read, and never shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid.cache.cache import HybridCache
from hybrid.engine.capture import Capture
from hybrid.engine.chains_ahead import ChainsAhead, Found
from hybrid.engine.predictor_passes import ChainNumbers, PredictorPasses, beliefs
from hybrid.engine.rounds import Rounds
from hybrid.engine.step import Part
from hybrid.models.mtp import HIDDEN
from hybrid.speculation.chances import CLAIMED, Claims, PredictedChain
from hybrid.speculation.config import MAX_DRAFTS
from hybrid.speculation.drafter import ChainDrafter, History
from hybrid.speculation.pace import clock_of

ALTERNATIVES = 2
"""Tokens that are proposed for each position: the most probable ones. On a CPU the most probable one alone is: passes
with trees are not captured, and take more than they yield."""


Proposed = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""What was predicted for a request, as `Drafter.propose` returns it."""

NOTHING: Proposed = ((), (), ())


@dataclass(eq=False, slots=True)
class _Known:
    """What is known of a request.

    Attributes:
        claims: how often drafts were right, by the probability that the predictor gave them.
        chains: those that were not compared with what came.
        asked: tokens that were asked for.
    """

    claims: Claims
    chains: list[PredictedChain] = field(default_factory=list)
    asked: int = 0

    def compare(self, ids: Sequence[int]) -> None:
        """Compare chains with the tokens that came."""
        for chain in self.chains:
            self.claims.compare(chain, ids)
        self.chains.clear()


class MtpDrafter(ChainDrafter):
    """Drafts what the predictor says: a chain of its most probable tokens, each with alternatives.

    How often it was right with what it gave some probability is learned; these are the probabilities of its drafts.
    On a CPU, where the host waits for each pass, a chain is not continued where one more token would not pay.

    Args:
        model: has a predictor.
        cache: the memory that the model reads and writes.
        device: of the model.
        capture: captures passes of the predictor; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Any,
        cache: HybridCache,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._alternatives = 1 if device.type == "cpu" else ALTERNATIVES
        hidden, page_size = cache.state_tensors[HIDDEN], cache.config.page_size
        self._passes = PredictorPasses(model, cache.kv, hidden, device, self._alternatives, page_size, capture)
        self._cache = cache
        self._claims = Claims(CLAIMED)
        self._known: dict[History, _Known] = {}
        self._parts: dict[History, Part] = {}
        self._proposed: dict[History, Proposed] = {}
        self._rounds: Rounds | None = None  # of the step before, if chains were computed in its call
        self._clock = clock_of(device.type)

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "mtp"

    def begin(self, parts: Sequence[Part]) -> None:
        """The parts of the next step whose requests may have drafts."""
        self._parts = {part.request.history: part for part in parts}
        self._proposed = {}

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
        """Predict up to this many tokens after each of these histories, as far as there is memory for them, and as
        they were not predicted in the call of the pass before."""
        asked, page_size = [], self._cache.config.page_size
        before, self._rounds = self._rounds, None
        chains, rows = (before.chains, before.rows()) if before is not None else (None, {})
        found = chains.captured.found if chains is not None and rows else None
        self.seconds_before: float = 0.0
        self.each_before: float = 0.0
        self.passes_before: int = 1
        if before is not None and chains is not None and rows:
            self.seconds_before, self.passes_before = chains.latest_seconds, before.count
            self.each_before = chains.seconds / before.count
        for history, count in wanted:
            if found is not None and history in rows:
                row, most = rows[history]
                self._compared(history, count)
                self._proposed[history] = self._proposal(found, row, history, min(count, most))
                continue
            part = self._parts[history]
            pages = len(part.lease.block_table) * page_size
            if part.end + count - 1 > pages and not self._cache.reserve(part.lease, part.end + count - 1):
                count = pages - part.start
            asked.append((part, count))
        if asked:
            for (part, _), proposed in zip(asked, self._predict(asked), strict=True):
                self._proposed[part.request.history] = proposed

    def num_ahead(self, history: History) -> int:
        """Tokens that may be predicted of a request in the call of its pass, after the tokens that the pass chooses."""
        return self._known[history].asked if history in self._proposed else 0

    def chains_of(self, history: History) -> list[PredictedChain]:
        """Those of a request that were not compared with what came; more may be added."""
        known = self._known.get(history)
        return known.chains if known is not None else []

    def follow(self, rounds: Rounds) -> None:
        """The next chains may be computed in these rounds."""
        self._rounds = rounds

    def ahead(self, parts: Sequence[Part]) -> ChainsAhead | None:
        """Chains that are computed in the call of the pass of these parts, each of which has `num_ahead`; None: they
        cannot be."""
        known = [self._known[part.request.history] for part in parts]
        most = max([min(each.asked, part.request.num_left - 2) for each, part in zip(known, parts, strict=True)])
        if most <= 0:
            return None
        rates = [each.claims.rates for each in known]
        width = self._passes.width(max([len(part.lease.block_table) for part in parts]))
        captured = self._passes.captured((len(parts), width))
        if captured is None:
            return None
        return ChainsAhead(captured, beliefs(rates, self.least), min(most, MAX_DRAFTS), self._clock)

    def propose(self, history: History, limit: int) -> Proposed:
        """What was predicted, with its probabilities."""
        return self._proposed.get(history, NOTHING)

    def _predict(self, asked: Sequence[tuple[Part, int]]) -> list[Proposed]:
        """What follows the last known token of each part, for each as many tokens as are asked for."""
        self._cache.memory.in_flight.settle()
        numbers, counts = self._numbers([part for part, _ in asked]), [count for _, count in asked]
        histories = [part.request.history for part, _ in asked]
        # as they were before the latest tokens came: chains may be computed in the call that chooses these
        rates = [[*self._known_of(history).claims.rates] for history in histories]
        for history, count in zip(histories, counts, strict=True):
            self._compared(history, count)
        found = self._passes.chains(numbers, max(counts), rates, self.least)
        return [self._proposal(found, row, histories[row], count) for row, count in enumerate(counts)]

    def _numbers(self, parts: Sequence[Part]) -> ChainNumbers:
        """Those of the last known tokens of parts."""
        tables = [part.lease.block_table for part in parts]
        width = self._passes.width(max(map(len, tables)))
        return ChainNumbers([self._row(part) for part in parts], tables, width, self._cache.config.page_size)

    def _known_of(self, history: History) -> _Known:
        known = self._known.get(history)
        if known is None:
            known = self._known[history] = _Known(self._claims.of_request())
        return known

    def _compared(self, history: History, count: int) -> None:
        """Look at what came up to the last token of a request. `count` tokens after it are asked for."""
        known = self._known_of(history)
        known.compare(history.ids)
        known.asked = count

    def _proposal(self, found: Found, row: int, history: History, most: int) -> Proposed:
        """The chain of a request, and then its alternatives."""
        (passes, claims), known = found, self._known[history]
        named, claimed = [own[row][0] for own in passes[:most]], [own[row][0] for own in claims[:most]]
        known.chains.append(PredictedChain(len(history.ids), named, claimed))
        tokens, count = array("q", named), len(named)
        chances = [*map(known.claims.of, claimed)]
        for rank in range(1, self._alternatives):  # what is left of the probability, in parts as they are claimed
            tokens.extend([own[row][rank] for own in passes[:most]])
            for own, chance in zip(claims, chances[:count], strict=False):
                left = 1 - own[row][0]
                chances.append((1 - chance) * min(own[row][rank] / left, 1.0) if left > 0 else 0.0)
        chain = range(-1, count - 1)
        return tokens, chain if self._alternatives == 1 else [*chain] * self._alternatives, chances

    def end(self, history: History) -> None:
        """Learn from a request that has ended."""
        known = self._known.pop(history, None)
        if known is not None:
            known.compare(history.ids)
            self._claims.absorb(known.claims)

    def _row(self, part: Part) -> tuple[int, ...]:
        """The numbers of the last known token of a part, as `ChainNumbers` has them."""
        lease, media, page_size = part.lease, part.request.media, self._cache.config.page_size
        page, offset = divmod(part.start, page_size)
        # the tree's pages have what is kept of it
        slot = lease.block_table[page] * page_size + offset if page >= lease.num_shared else -1
        shift = media.shift if media is not None else 0  # what is generated after images has text positions
        return part.request.ids[-1], part.start + shift, slot, part.end, lease.read_slot
