"""Passes of a checkpoint's predictor over one token of each of some requests, captured where decode steps are."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import Batch, Group
from hybrid.engine.capture import Capture
from hybrid.engine.cuda_graphs import CapturedModel
from hybrid.engine.padding import Padding
from hybrid.engine.pieces import ALIGNMENT
from hybrid.kernels.ops import compiled_module
from hybrid.memory.device import on_device

log: logging.Logger = logging.getLogger(__name__)

MAX_PASSES = 64
"""Captured passes that are kept, at most; the one that was not used for longest goes."""

COLUMNS = 5
"""Integers of a request, besides its page ids: token, rotary position, slot, length, state slot."""


class ChainNumbers:
    """The integers of passes over the last known token of each of some requests, and over those after it.

    Args:
        rows: of each request `COLUMNS` without the places of its pages: its last token, that token's rotary position,
            the slot of its keys and values (-1: they are not written), the sequence's length up to there, and the state
            slot with the hidden state before it.
        tables: the page ids of each request.
        width: as many page ids are given of each.
        page_size: tokens of a page.
    """

    def __init__(
        self, rows: Sequence[tuple[int, ...]], tables: Sequence[Sequence[int]], width: int, page_size: int
    ) -> None:
        self._rows = rows
        self._tables: list[int] = []
        for table in tables:
            self._tables += table
            self._tables += [0] * (width - len(table))
        self._page_size = page_size
        self.width: int = width

    def at(self, ahead: int, count: int) -> list[int]:
        """Those of the pass over the token that is `ahead` of the last known one, of the first `count` requests: the
        columns, each filled up to whole `ALIGNMENT`s, and then the page ids."""
        rows = [self._next(row, ahead) for row in range(count)] if ahead else self._rows[:count]
        numbers: list[int] = []
        idle = [0] * (-count % ALIGNMENT)
        for column in zip(*rows, strict=True):
            numbers += column
            numbers += idle
        return numbers + self._tables[: count * self.width]

    def _next(self, row: int, ahead: int) -> tuple[int, ...]:
        """What the row of a token becomes: as `hybrid.kernels.cpu.drafts.go_on` has it. Its own token is not known to
        the host, and the hidden state before it is in no slot."""
        _, position, _, length, _ = self._rows[row]
        page, offset = divmod(length + ahead - 1, self._page_size)
        slot = self._tables[row * self.width + page] * self._page_size + offset
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
        tokens, positions, slots, lengths, states = columns
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
            blocks=None,
        )


class Predicted(NamedTuple):
    """What a pass has computed for N requests: valid until the next one, which may begin with it.

    Attributes:
        tokens: `[N, K]` the most probable tokens of each, falling.
        chances: `[N, K]` fp32, their probabilities.
        hidden: `[N, hidden_size]` the hidden states that they follow from.
        host: tokens and probabilities once more, where the host reads them in the same memory.
    """

    tokens: Tensor
    chances: Tensor
    hidden: Tensor
    host: tuple[np.ndarray, np.ndarray] | None = None

    def first(self, count: int) -> Predicted:
        """Of the first requests."""
        if self.tokens.shape[0] == count:
            return self
        return Predicted(self.tokens[:count], self.chances[:count], self.hidden[:count])

    def lists(self) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens and their probabilities, once they are there."""
        tokens, chances = self.host or (self.tokens, self.chances)
        return tokens.tolist(), chances.tolist()


class _Captured(NamedTuple):
    """A captured pass: its integers as the host writes them, what it reads, what runs it, and what it writes: the
    tokens, the hidden states and all other integers of the pass after it, where that reads them. So to run it again is
    to continue the chain. All that it reads must stay where it is."""

    values: np.ndarray
    inputs: PredictorInputs
    batch: Batch
    run: Callable[[], None]
    predicted: Predicted


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
        self._captured: OrderedDict[tuple[int, int], _Captured] = OrderedDict()  # in the order in which they were used
        self._captured_model = CapturedModel(model)
        self._latest: Predicted | None = None  # of the captured pass that ran last, its requests, what runs it again
        self._count = 0
        self._again: Callable[[], None] = lambda: None

    @property
    def num_captured(self) -> int:
        """Number of passes that are captured."""
        return len(self._captured)

    def width(self, num_pages: int) -> int:
        """Columns of a block table of this many pages, such that few widths occur where passes are captured."""
        return num_pages if self._capture is None else Padding.of(1, num_pages).width

    def run(self, numbers: ChainNumbers, ahead: int, count: int, before: Predicted | None) -> Predicted:
        """The tokens after each.

        Args:
            numbers: of the requests.
            ahead: how far the tokens of this pass are after the last known ones.
            count: the first `count` requests are computed.
            before: of the pass over the tokens before, which are those that it found most probable, of at least as many
                requests; None: this is the first one.
        """
        if before is not None and before is self._latest and count == self._count:  # it left all that this one reads
            self._again()
            return before
        shape, values, captured = (count, numbers.width), numbers.at(ahead, count), None
        if self._capture is not None and not self._captured_model.is_hooked:
            captured = self._captured.get(shape) or self._record(self._capture, shape, values)
        before = before.first(count) if before is not None else None
        if captured is None:
            inputs = self._inputs(values, count)
            self._fill(inputs, before)
            logits, hidden = self._model.draft(inputs.batch(), inputs.hidden, self._kv)
            chances, tokens = logits.softmax(-1).topk(self._alternatives)
            return Predicted(tokens, chances, hidden)
        self._captured.move_to_end(shape)
        captured.values[:] = values
        if before is not None:
            self._fill(captured.inputs, before)
        captured.run()
        self._latest, self._count, self._again = captured.predicted, count, captured.run
        return captured.predicted

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

    def _record(self, capture: Capture, shape: tuple[int, int], values: list[int]) -> _Captured | None:
        """Capture a pass of this shape, which is run for that with these numbers. If it fails, no other is tried."""
        inputs = self._inputs(values, shape[0])
        batch = inputs.batch()
        drafts: Any = compiled_module("drafts")
        memory: Any = compiled_module("memory")
        predicted = Predicted(inputs.tokens.unsqueeze(1), torch.empty(shape[0], 1), inputs.hidden)
        host = inputs.tokens.as_strided((len(values),), (1,)).numpy()  # all integers, which begin with the tokens

        def run() -> Tensor:
            memory.take_rows(self._states, inputs.states, inputs.hidden)
            logits, hidden = self._model.draft(batch, inputs.hidden, self._kv)
            drafts.choose_drafts(logits, hidden, inputs.tokens, inputs.hidden, predicted.chances)
            places = inputs.positions, inputs.slots, inputs.lengths, inputs.states
            drafts.go_on(*places, inputs.block_table, self._page_size)
            return predicted.chances

        try:
            run()  # what a model computes once is no part of the program
            host[:] = values
            again, _ = capture(run)
        except Exception as error:
            self._capture = None
            log.warning("capturing the predictor failed (%s: %s); it is launched", type(error).__name__, error)
            return None
        if len(self._captured) == MAX_PASSES:
            self._captured.popitem(last=False)
        predicted = predicted._replace(host=(predicted.tokens.numpy(), predicted.chances.numpy()))
        captured = self._captured[shape] = _Captured(host, inputs, batch, again, predicted)
        return captured
