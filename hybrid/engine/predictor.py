"""Drafts of a checkpoint's own predictor, for all requests of a step together.

The predictor is computed between two passes of the model: it reads the last hidden state of each request from the
request's state slot, and its keys and values from the request's pages, where every pass of the model writes them along.
Those that it writes itself, in the places of its drafts, are overwritten by the pass that verifies them; what is after
the accepted ones is never read, and never shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.cache.cache import HybridCache
from hybrid.engine.capture import Capture
from hybrid.engine.pieces import ALIGNMENT
from hybrid.engine.predictor_passes import PredictorInputs, PredictorPasses
from hybrid.engine.step import Part
from hybrid.memory.device import on_device
from hybrid.models.mtp import HIDDEN
from hybrid.speculation.drafter import Drafter, History

WIDTH = 2
"""Tokens that are proposed for each position: the most probable ones."""


class Proposed(NamedTuple):
    """What was predicted for a request.

    Attributes:
        tokens: for each position the most probable ones, falling.
        chances: their probabilities.
    """

    tokens: list[list[int]]
    chances: list[list[float]]


class _Rows(NamedTuple):
    """One row for each request: its last known token.

    Attributes:
        tokens, states: `[R]` the tokens, and the slots with the hidden states before them.
        lengths: `[R]` tokens of the sequences up to there.
        positions: `[R]` rotary positions.
        slots: `[depth, R]` of each token and of those after it.
        block_table: `[R, max_pages]`.
    """

    tokens: Tensor
    states: Tensor
    lengths: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor

    def ahead(self, tokens: Tensor, hidden: Tensor, ahead: int) -> PredictorInputs:
        """The tokens `[N]` of the first rows that are `ahead` of the last known ones."""
        rows = slice(0, len(tokens))
        positions, lengths = self.positions[rows] + ahead, self.lengths[rows] + ahead
        return PredictorInputs(tokens, positions, self.slots[ahead, rows], lengths, self.block_table[rows], hidden)


class MtpDrafter(Drafter):
    """Drafts what the predictor says: a chain of its most probable tokens, each with an alternative.

    Args:
        model: has a predictor.
        cache: the memory that the model reads and writes.
        device: of the model.
        capture: captures passes of the predictor; None: each is launched kernel by kernel.
    """

    def __init__(self, model: Any, cache: HybridCache, device: torch.device, capture: Capture | None = None) -> None:
        self._passes = PredictorPasses(model, cache.kv, capture)
        self._cache = cache
        self._device = device
        self._parts: dict[History, Part] = {}
        self._proposed: dict[History, Proposed] = {}

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "mtp"

    def begin(self, parts: Iterable[Part]) -> None:
        """The parts of the next step whose requests may have drafts."""
        self._parts = {part.request.history: part for part in parts}
        self._proposed.clear()

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
        """Predict up to this many tokens after each of these histories, as far as there is memory for them."""
        asked = []
        for history, count in wanted:
            part = self._parts[history]
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
        depth = len(proposed.tokens)
        tokens = [own[rank] for rank in range(WIDTH) for own in proposed.tokens]  # the chain is first
        chances = [own[rank] for rank in range(WIDTH) for own in proposed.chances]
        return tokens, [*range(-1, depth - 1)] * WIDTH, chances

    def _predict(self, asked: Sequence[tuple[Part, int]]) -> list[Proposed]:
        """What follows the last known token of each part, for each as many tokens as are asked for."""
        rows = self._rows([part for part, _ in asked], asked[0][1])
        tokens, hidden = rows.tokens, self._cache.state_tensors[HIDDEN][rows.states]
        found: list[tuple[Tensor, Tensor]] = []
        for ahead in range(asked[0][1]):
            count = sum(wanted > ahead for _, wanted in asked)
            logits, hidden = self._passes.run(rows.ahead(tokens[:count], hidden[:count], ahead))
            chances, likely = logits.softmax(-1).topk(WIDTH)
            found.append((likely, chances))
            tokens = likely[:, 0]
        lists = [(tokens.tolist(), chances.tolist()) for tokens, chances in found]
        return [
            Proposed([tokens[row] for tokens, _ in lists[:count]], [chances[row] for _, chances in lists[:count]])
            for row, (_, count) in enumerate(asked)
        ]

    def _rows(self, parts: Sequence[Part], depth: int) -> _Rows:
        """The numbers of the last known token of each part, and of up to `depth - 1` after it."""
        page_size = self._cache.config.page_size
        width = self._passes.width(max(len(part.lease.block_table) for part in parts))
        numbers: list[list[int]] = []
        for part in parts:
            table, media = part.lease.block_table, part.request.media
            shift = media.shift if media is not None else 0  # what is generated after images has text positions
            slots = [-1] * depth  # the tree's pages have what is kept of the last known token
            for ahead in range(depth):
                page, offset = divmod(part.start + ahead, page_size)
                if part.lease.num_shared <= page < len(table):
                    slots[ahead] = table[page] * page_size + offset
            own = [part.request.ids[-1], part.lease.read_slot, part.end, part.start + shift]
            numbers.append([*own, *slots, *table, *[0] * (width - len(table))])
        numbers += numbers[-1:] * (len(parts) % ALIGNMENT)  # so that every column is aligned
        columns = on_device(torch.tensor(numbers), self._device).t().contiguous()[:, : len(parts)]
        tokens, states, lengths, positions = columns[:4]
        return _Rows(tokens, states, lengths, positions, columns[4 : 4 + depth], columns[4 + depth :].t().contiguous())
