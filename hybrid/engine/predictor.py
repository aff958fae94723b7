"""Drafts of a checkpoint's own predictor, for all requests of a step together.

The predictor is computed between two passes of the model: it reads the last hidden state of each request from the
request's state slot, and its keys and values from the request's pages, where every pass of the model writes them along.
Those that it writes itself, in the places of its drafts, are overwritten by the pass that verifies them; what is after
the accepted ones is never read, and never shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.cache.cache import HybridCache
from hybrid.engine.capture import Capture
from hybrid.engine.predictor_passes import Predicted, PredictorNumbers, PredictorPasses
from hybrid.engine.step import Part
from hybrid.models.mtp import HIDDEN
from hybrid.speculation.drafter import Drafter, History

ALTERNATIVES = 2
"""Tokens that are proposed for each position: the most probable ones. On a CPU the most probable one alone is: passes
with trees are not captured, and take more than they yield."""


class Proposed(NamedTuple):
    """What was predicted for a request.

    Attributes:
        tokens: for each position the most probable ones, falling.
        chances: their probabilities.
    """

    tokens: list[list[int]]
    chances: list[list[float]]


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
        hidden = cache.state_tensors[HIDDEN]
        self._passes = PredictorPasses(model, cache.kv, hidden, device, self._alternatives, capture)
        self._least = least
        self._cache = cache
        self._parts: Sequence[Part] = ()
        self._proposed: dict[History, Proposed] = {}

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "mtp"

    def begin(self, parts: Sequence[Part]) -> None:
        """The parts of the next step whose requests may have drafts."""
        self._parts = parts
        self._proposed.clear()

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
        """Predict up to this many tokens after each of these histories, as far as there is memory for them."""
        asked = []
        parts = {part.request.history: part for part in self._parts}
        for history, count in wanted:
            part = parts[history]
            if not self._cache.reserve(part.lease, part.end + count - 1):
                count = len(part.lease.block_table) * self._cache.config.page_size - part.start
            asked.append((part, count))
        asked.sort(key=lambda each: -each[1])  # those of which another token is wanted are the first rows
        for (part, _), proposed in zip(asked, self._predict(asked), strict=True):
            self._proposed[part.request.history] = proposed

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """What was predicted, with its probabilities."""
        proposed = self._proposed.get(history)
        if proposed is None:
            return (), (), ()
        depth, ranks = len(proposed.tokens), range(self._alternatives)
        tokens = [own[rank] for rank in ranks for own in proposed.tokens]  # the chain is first
        chances = [own[rank] for rank in ranks for own in proposed.chances]
        return tokens, [*range(-1, depth - 1)] * self._alternatives, chances

    def _predict(self, asked: Sequence[tuple[Part, int]]) -> list[Proposed]:
        """What follows the last known token of each part, for each as many tokens as are asked for."""
        width = self._passes.width(max(len(part.lease.block_table) for part, _ in asked))
        found: list[tuple[Tensor, Tensor]] = []
        lists: list[tuple[list[list[int]], list[list[float]]]] = []
        before: Predicted | None = None
        reached = [1.0] * len(asked)
        for ahead in range(asked[0][1]):
            rows = [self._row(part, ahead) for part, wanted in asked if wanted > ahead]
            tables = [part.lease.block_table for part, _ in asked[: len(rows)]]
            numbers = PredictorNumbers.of(rows, tables, width)
            before = self._passes.run(numbers, before.first(len(rows)) if before is not None else None)
            if not self._waits:
                found.append((before.tokens, before.chances))
                continue
            lists.append((before.tokens.tolist(), before.chances.tolist()))
            reached = [chance * own[0] for chance, own in zip(reached, lists[-1][1], strict=False)]
            if max(reached) < self._least:
                break
        lists += [(tokens.tolist(), chances.tolist()) for tokens, chances in found]
        return [
            Proposed([tokens[row] for tokens, _ in lists[:count]], [chances[row] for _, chances in lists[:count]])
            for row, (_, count) in enumerate(asked)
        ]

    def _row(self, part: Part, ahead: int) -> tuple[int, ...]:
        """The numbers of the token that is `ahead` of the last known one of a part, without its page ids."""
        lease, media, page_size = part.lease, part.request.media, self._cache.config.page_size
        page, offset = divmod(part.start + ahead, page_size)
        # the tree's pages have what is kept of the last known token
        is_own = lease.num_shared <= page < len(lease.block_table)
        slot = lease.block_table[page] * page_size + offset if is_own else -1
        shift = media.shift if media is not None else 0  # what is generated after images has text positions
        token = 0 if ahead else part.request.ids[-1]
        return token, part.start + shift + ahead, slot, part.end + ahead, -1 if ahead else lease.read_slot
