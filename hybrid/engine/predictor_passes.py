"""Passes of a checkpoint's predictor over one token of each of some requests, captured where decode steps are."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.batch import Batch, Group
from hybrid.engine.capture import Capture
from hybrid.engine.chains_ahead import CapturedChains, Found
from hybrid.engine.cuda_graphs import CapturedModel
from hybrid.engine.padding import Padding
from hybrid.engine.pieces import ALIGNMENT
from hybrid.kernels.ops import compiled_module
from hybrid.memory.device import on_device
from hybrid.speculation.chances import CLAIMS, rate_of
from hybrid.speculation.config import MAX_DRAFTS

log: logging.Logger = logging.getLogger(__name__)

MAX_PASSES = 64
"""Captured passes that are kept, at most; the one that was not used for longest goes."""

COLUMNS = 6
"""Integers of a request, besides its page ids: as `hybrid.kernels.cpu.drafts.Chains.columns`."""


class ChainNumbers:
    """The integers of passes over the last known token of each of some requests, and over those after it.

    Args:
        rows: of each request its last token, that token's rotary position, the slot of its keys and values (-1: they
            are not written), the sequence's length up to there, and the state slot with the hidden state before it.
        tables: the page ids of each request.
        width: as many page ids are given of each.
        page_size: tokens of a page.

    Attributes:
        shape: number of requests, and `width`.
    """

    def __init__(
        self, rows: Sequence[tuple[int, ...]], tables: Sequence[Sequence[int]], width: int, page_size: int
    ) -> None:
        self._rows = rows
        self._tables: list[int] = []
        for table in tables:
            self._tables += table
            self._tables += [0] * (width - len(table))
        self._ends = [len(table) * page_size for table in tables]
        self._page_size = page_size
        self.shape: tuple[int, int] = (len(rows), width)

    def at(self, ahead: int) -> list[int]:
        """Those of the pass over the tokens that are `ahead` of the last known ones: the columns, each filled up to
        whole `ALIGNMENT`s, and then the page ids."""
        rows = [self._next(row, ahead) for row in range(len(self._rows))] if ahead else self._rows
        numbers: list[int] = []
        idle = [0] * (-len(rows) % ALIGNMENT)
        for column in (*zip(*rows, strict=True), self._ends):
            numbers += column
            numbers += idle
        return numbers + self._tables

    def _next(self, row: int, ahead: int) -> tuple[int, ...]:
        """What the row of a token becomes, as `hybrid.kernels.cpu.drafts.continue_chains` has it. Its own token is not
        known to the host, and the hidden state before it is in no slot."""
        _, position, _, length, _ = self._rows[row]
        if length + ahead > self._ends[row]:  # it has no page: what is computed is of no use
            return 0, position + ahead, -1, self._ends[row], -1
        page, offset = divmod(length + ahead - 1, self._page_size)
        slot = self._tables[row * self.shape[1] + page] * self._page_size + offset
        return 0, position + ahead, slot, length + ahead, -1


class PredictorInputs(NamedTuple):
    """What a pass of the predictor reads, for N requests.

    Attributes:
        tokens: `[N]` the tokens.
        positions: `[N]` their rotary positions.
        slots: `[N]` where their keys and values are written; -1: nowhere.
        lengths: `[N]` of the sequences up to there.
        states: `[N]` the state slots with the hidden states before them; -1: those of the predictor are taken.
        block_table: `[N, max_pages]`.
        hidden: `[N, hidden_size]` the hidden states before them.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    states: Tensor
    block_table: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, numbers: Tensor, count: int, hidden: Tensor) -> PredictorInputs:
        """Views of `ChainNumbers.at`, and what is read besides."""
        length = count + -count % ALIGNMENT
        columns = [numbers[length * column :][:count] for column in range(COLUMNS)]
        tokens, positions, slots, lengths, states, _ = columns
        block_table = numbers[length * COLUMNS :].view(count, -1)
        return cls(tokens, positions, slots, lengths, states, block_table, hidden)

    def batch(self) -> Batch:
        """The tokens, as ones that are decoded."""
        count = len(self.tokens)
        starts = torch.arange(count + 1, device=self.tokens.device)
        nothing = self.tokens.new_empty(0)
        rows = slice(0, count)
        return Batch(
            token_ids=self.tokens,
            positions=self.positions,
            slot_mapping=self.slots,
            checkpoints=nothing,
            sample_rows=nothing,
            prefills=None,
            decodes=Group(rows, starts, self.lengths, self.block_table, nothing, nothing, num_splits=None),
            decode_start=None,
        )


class Predicted(NamedTuple):
    """What a pass has computed for N requests.

    Attributes:
        tokens: `[N, K]` the most probable tokens of each, falling.
        chances: `[N, K]` fp32, their probabilities.
        hidden: `[N, hidden_size]` the hidden states that they follow from.
    """

    tokens: Tensor
    chances: Tensor
    hidden: Tensor


@lru_cache
def _width(num_pages: int) -> int:
    return Padding.of(1, num_pages).width


def beliefs(rates: Sequence[Sequence[float]], least: float) -> list[float]:
    """As `hybrid.kernels.cpu.drafts.Chains` has them; the arguments are those of `PredictorPasses.chains`."""
    return [least, *[1.0] * len(rates), *chain.from_iterable(rates)]


class PredictorPasses:
    """Runs passes of the predictor.

    Args:
        model: has a predictor.
        kv: the pages.
        states: `[slots, hidden_size]` the last hidden state of each sequence.
        device: of the model.
        alternatives: tokens that are found for each position.
        page_size: tokens of a page.
        capture: captures passes, on a CPU, where there are no alternatives; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Any,
        kv: Tensor,
        states: Tensor,
        device: torch.device,
        alternatives: int,
        page_size: int,
        capture: Capture | None = None,
    ) -> None:
        self._page_size = page_size
        self._model = model
        self._kv = kv
        self._states = states
        self._device = device
        self._alternatives = alternatives
        self._capture = capture
        # in the order in which they were used
        self._captured: OrderedDict[tuple[int, int], CapturedChains] = OrderedDict()
        self._captured_model = CapturedModel(model.mtp, model.model.embed_tokens, model.lm_head)

    @property
    def num_captured(self) -> int:
        """Number of passes that are captured."""
        return len(self._captured)

    def width(self, num_pages: int) -> int:
        """Columns of a block table of this many pages, such that few widths occur where passes are captured."""
        return num_pages if self._capture is None else _width(num_pages)

    def chains(self, numbers: ChainNumbers, most: int, rates: Sequence[Sequence[float]], least: float) -> Found:
        """Chains of tokens after each request.

        Args:
            numbers: of the requests.
            most: tokens of a chain.
            rates: how often the predictor was right about each request, by tenths of what it claims.
            least: on a CPU, where the host waits for each pass, there are no more of them once all chains are less
                probable.
        """
        captured = self.captured(numbers.shape)
        if captured is None and self._capture is not None and not self._captured_model.is_hooked:
            captured = self._record(self._capture, numbers)
        if captured is None:
            return self._launched(numbers, most, rates, least)
        captured.values[:] = numbers.at(0)
        captured.beliefs[:] = beliefs(rates, least)
        captured.control[:] = 0
        captured.run(min(most, MAX_DRAFTS))
        return captured.found

    def captured(self, shape: tuple[int, int]) -> CapturedChains | None:
        """The captured pass of this `ChainNumbers.shape`; None: it is not captured."""
        if self._captured_model.is_hooked:
            return None
        captured = self._captured.get(shape)
        if captured is not None:
            self._captured.move_to_end(shape)
        return captured

    def _launched(self, numbers: ChainNumbers, most: int, rates: Sequence[Sequence[float]], least: float) -> Found:
        """The same, kernel by kernel."""
        before: Predicted | None = None
        passes: list[Predicted] = []
        reached = [1.0] * len(rates)
        for ahead in range(most):
            inputs = self._inputs(numbers.at(ahead), len(rates))
            self._fill(inputs, before)
            logits, hidden = self._model.draft(inputs.batch(), inputs.hidden, self._kv)
            chances, tokens = logits.softmax(-1).topk(self._alternatives)
            before = Predicted(tokens, chances, hidden)
            passes.append(before)
            if self._device.type == "cpu":
                first = chances[:, 0].tolist()
                reached = [
                    own * rate_of(each, claimed) for own, each, claimed in zip(reached, rates, first, strict=True)
                ]
                if max(reached) < least:
                    break
        return [each.tokens.tolist() for each in passes], [each.chances.tolist() for each in passes]

    def _inputs(self, values: list[int], count: int) -> PredictorInputs:
        """What a pass reads, without hidden states."""
        hidden = self._states.new_empty(count, self._states.shape[1])
        return PredictorInputs.of(on_device(torch.tensor(values), self._device), count, hidden)

    def _fill(self, inputs: PredictorInputs, before: Predicted | None) -> None:
        """Write the hidden states that a pass reads, and tokens that are not known to the host."""
        if before is None:
            torch.index_select(self._states, 0, inputs.states, out=inputs.hidden)
        else:
            inputs.tokens.copy_(before.tokens[:, 0])
            inputs.hidden.copy_(before.hidden)

    def _record(self, capture: Capture, numbers: ChainNumbers) -> CapturedChains | None:
        """Capture a pass of this shape, which is run for that with these numbers. If it fails, no other is tried."""
        (count, width), values = numbers.shape, numbers.at(0)
        host = torch.zeros(len(values) + 2, dtype=torch.int64)
        given = host[: len(values)]
        given.copy_(torch.tensor(values))
        inputs = PredictorInputs.of(given, count, self._states.new_empty(count, self._states.shape[1]))
        batch = inputs.batch()
        drafts: Any = compiled_module("drafts")
        memory: Any = compiled_module("memory")
        chains = drafts.Chains(
            given[: len(values) - count * width].view(COLUMNS, -1),
            inputs.block_table,
            chances=torch.empty(count),
            beliefs=torch.zeros(1 + count + count * CLAIMS),
            control=host[-2:],
            tokens=torch.empty(MAX_DRAFTS, count, 1, dtype=torch.int64),
            claims=torch.empty(MAX_DRAFTS, count, 1),
        )

        def run() -> Tensor:
            memory.take_rows(self._states, inputs.states, inputs.hidden)
            logits, hidden = self._model.draft(batch, inputs.hidden, self._kv)
            drafts.choose_drafts(logits, hidden, inputs.tokens, inputs.hidden, chains.chances)
            drafts.continue_chains(chains, self._page_size)
            return inputs.tokens

        try:
            run()  # what a model computes once is no part of the program
            given.copy_(torch.tensor(values))  # they are those of the next token now
            program, _ = capture(run)
        except Exception as error:
            self._capture = None
            log.warning("capturing the predictor failed (%s: %s); it is launched", type(error).__name__, error)
            return None
        if len(self._captured) == MAX_PASSES:
            self._captured.popitem(last=False)
        captured = self._captured[numbers.shape] = CapturedChains(
            given.numpy(),
            chains,
            chains.beliefs.numpy(),
            chains.control.numpy(),
            chains.tokens.numpy(),
            chains.claims.numpy(),
            program,
            self._page_size,
            (inputs, batch),
        )
        return captured
