"""Drafts of a checkpoint's own predictor, for all requests of a step together.

The predictor is computed between two passes of the model: it reads the last hidden state of each request from the
request's state slot, and its keys and values from the request's pages, where every pass of the model writes them along.
Those that it writes itself, in the places of its drafts, are overwritten by the pass that verifies them; what is after
the accepted ones is never read, and never shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from hybrid.cache.cache import HybridCache
from hybrid.engine.capture import Capture
from hybrid.engine.predictor_passes import ChainNumbers, Predicted, PredictorPasses
from hybrid.engine.step import Part
from hybrid.models.mtp import HIDDEN
from hybrid.speculation.drafter import Drafter, History

ALTERNATIVES = 2
"""Tokens that are proposed for each position: the most probable ones. On a CPU the most probable one alone is: passes
with trees are not captured, and take more than they yield."""


Proposed = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""What was predicted for a request, as `Drafter.propose` returns it."""

NOTHING: Proposed = ((), (), ())


class MtpDrafter(Drafter):
    """Drafts what the predictor says: a chain of its most probable tokens, each with alternatives.

    Args:
        model: has a predictor.
        cache: the memory that the model reads and writes.
        device: of the model.
        capture: captures passes of the predictor; None: each is launched kernel by kernel.
        least: on a CPU, where the host waits for each pass, the chance of a chain below which it is not continued.
    """

    def __init__(
        self,
        model: Any,
        cache: HybridCache,
        device: torch.device,
        capture: Capture | None = None,
        least: float = 0.0,
    ) -> None:
        self._waits = device.type == "cpu"
        self._alternatives = 1 if self._waits else ALTERNATIVES
        hidden, page_size = cache.state_tensors[HIDDEN], cache.config.page_size
        self._passes = PredictorPasses(model, cache.kv, hidden, device, self._alternatives, page_size, capture)
        self._least = least
        self._cache = cache
        self._parts: dict[History, Part] = {}
        self._proposed: dict[History, Proposed] = {}

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "mtp"

    def begin(self, parts: Sequence[Part]) -> None:
        """The parts of the next step whose requests may have drafts."""
        self._parts = {part.request.history: part for part in parts}
        self._proposed = {}

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
        """Predict up to this many tokens after each of these histories, as far as there is memory for them."""
        asked, page_size = [], self._cache.config.page_size
        for history, count in wanted:
            part = self._parts[history]
            known = len(part.lease.block_table) * page_size
            if part.end + count - 1 > known and not self._cache.reserve(part.lease, part.end + count - 1):
                count = known - part.start
            asked.append((part, count))
        if len(asked) > 1:
            asked.sort(key=lambda each: -each[1])  # those of which another token is wanted are the first rows
        for (part, _), proposed in zip(asked, self._predict(asked), strict=True):
            self._proposed[part.request.history] = proposed

    def propose(self, history: History, limit: int) -> Proposed:
        """What was predicted, with its probabilities."""
        return self._proposed.get(history, NOTHING)

    def _predict(self, asked: Sequence[tuple[Part, int]]) -> list[Proposed]:
        """What follows the last known token of each part, for each as many tokens as are asked for."""
        tables, page_size = [part.lease.block_table for part, _ in asked], self._cache.config.page_size
        width = self._passes.width(max(map(len, tables)))
        numbers = ChainNumbers([self._row(part) for part, _ in asked], tables, width, page_size)
        found: list[Predicted] = []
        lists: list[tuple[list[list[int]], list[list[float]]]] = []
        before: Predicted | None = None
        reached = [1.0] * len(asked)
        for ahead in range(asked[0][1]):
            count = len(asked) if len(asked) == 1 else sum([wanted > ahead for _, wanted in asked])
            before = self._passes.run(numbers, ahead, count, before.first(count) if before is not None else None)
            if not self._waits:
                found.append(before)
                continue
            lists.append(before.lists())
            reached = [chance * own[0] for chance, own in zip(reached, lists[-1][1], strict=False)]
            if max(reached) < self._least:
                break
        lists += [predicted.lists() for predicted in found]
        return [self._proposal(lists[:count], row) for row, (_, count) in enumerate(asked)]

    def _proposal(self, lists: Sequence[tuple[list[list[int]], list[list[float]]]], row: int) -> Proposed:
        """The chain of a request, and then its alternatives, from the tokens and probabilities of each pass."""
        ranks = range(self._alternatives)
        tokens = array("q", [tokens[row][rank] for rank in ranks for tokens, _ in lists])
        chances = [chances[row][rank] for rank in ranks for _, chances in lists]
        chain = range(-1, len(lists) - 1)
        return tokens, chain if len(ranks) == 1 else [*chain] * len(ranks), chances

    def _row(self, part: Part) -> tuple[int, ...]:
        """The numbers of the last known token of a part, as `ChainNumbers` has them."""
        lease, media, page_size = part.lease, part.request.media, self._cache.config.page_size
        page, offset = divmod(part.start, page_size)
        # the tree's pages have what is kept of it
        slot = lease.block_table[page] * page_size + offset if page >= lease.num_shared else -1
        shift = media.shift if media is not None else 0  # what is generated after images has text positions
        return part.request.ids[-1], part.start + shift, slot, part.end, lease.read_slot
