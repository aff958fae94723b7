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


class PredictorNumbers(NamedTuple):
    """The integers of a pass over one token of each of some requests.

    Attributes:
        count: number of requests.
        columns: `COLUMNS` with a number of each request, filled up to whole `ALIGNMENT`s.
        tables: the page ids of each request, and of more, in rows of `width`.
        width: of a row.
    """

    count: int  # type: ignore[assignment]  # hides the method of tuples, which nothing here calls
    columns: list[int]
    tables: list[int]
    width: int

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]], width: int) -> PredictorNumbers:
        """Page ids of requests, in rows of `width`, without a number of any."""
        pages: list[int] = []
        for table in tables:
            pages += table
            pages += [0] * (width - len(table))
        return cls(0, [], pages, width)

    def at(self, rows: Sequence[tuple[int, ...]]) -> PredictorNumbers:
        """With the numbers of the first requests."""
        columns: list[int] = []
        idle = [0] * (-len(rows) % ALIGNMENT)
        for column in zip(*rows, strict=True):
            columns += column
            columns += idle
        return PredictorNumbers(len(rows), columns, self.tables, self.width)

    @property
    def shape(self) -> tuple[int, int]:
        """What a pass is captured for."""
        return self.count, self.width

    @property
    def values(self) -> list[int]:
        """All integers of the pass: the columns, and then the page ids."""
        return self.columns + self.tables[: self.count * self.width]


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
        """Views of `PredictorNumbers.values`, and what is read besides."""
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
    """

    tokens: Tensor
    chances: Tensor
    hidden: Tensor

    def first(self, count: int) -> Predicted:
        """Of the first requests."""
        return self if self.tokens.shape[0] == count else Predicted(*(part[:count] for part in self))

    def lists(self) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens and their probabilities, once they are there."""
        return self.tokens.tolist(), self.chances.tolist()


class _Captured(NamedTuple):
    """A captured pass: its integers as the host writes them, what it reads, what runs it, and what it writes: tokens
    and hidden states where the pass after it reads them. All that it reads must stay where it is."""

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
        capture: captures passes, on a CPU, where there are no alternatives; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Any,
        kv: Tensor,
        states: Tensor,
        device: torch.device,
        alternatives: int,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._states = states
        self._device = device
        self._alternatives = alternatives
        self._capture = capture
        self._captured: OrderedDict[tuple[int, int], _Captured] = OrderedDict()  # in the order in which they were used
        self._captured_model = CapturedModel(model)

    @property
    def num_captured(self) -> int:
        """Number of passes that are captured."""
        return len(self._captured)

    def width(self, num_pages: int) -> int:
        """Columns of a block table of this many pages, such that few widths occur where passes are captured."""
        return num_pages if self._capture is None else Padding.of(1, num_pages).width

    def run(self, numbers: PredictorNumbers, before: Predicted | None) -> Predicted:
        """The tokens after each.

        Args:
            before: of the pass over the tokens before, which are those that it found most probable; None: the tokens
                and the state slots of the numbers are taken.
        """
        captured = None
        if self._capture is not None and not self._captured_model.is_hooked:
            captured = self._captured.get(numbers.shape) or self._record(self._capture, numbers)
        if captured is None:
            inputs = self._inputs(numbers)
            self._fill(inputs, before)
            logits, hidden = self._model.draft(inputs.batch(), inputs.hidden, self._kv)
            chances, tokens = logits.softmax(-1).topk(self._alternatives)
            return Predicted(tokens, chances, hidden)
        if before is captured.predicted:  # its tokens and hidden states are there, and its page ids
            columns = numbers.columns
            known = len(columns) // COLUMNS
            captured.values[known : len(columns)] = columns[known:]
        else:
            self._captured.move_to_end(numbers.shape)
            captured.values[:] = numbers.values
            if before is not None:
                self._fill(captured.inputs, before)
        captured.run()
        return captured.predicted

    def _inputs(self, numbers: PredictorNumbers) -> PredictorInputs:
        """What a pass reads, without hidden states."""
        hidden = self._states.new_empty(numbers.count, self._states.shape[1])
        return PredictorInputs.of(on_device(torch.tensor(numbers.values), self._device), numbers.count, hidden)

    def _fill(self, inputs: PredictorInputs, before: Predicted | None) -> None:
        """Write the hidden states that a pass reads, and tokens that are not known to the host."""
        if before is None:
            torch.index_select(self._states, 0, inputs.states, out=inputs.hidden)
        else:
            inputs.tokens.copy_(before.tokens[:, 0])
            inputs.hidden.copy_(before.hidden)

    def _record(self, capture: Capture, numbers: PredictorNumbers) -> _Captured | None:
        """Capture a pass of this shape, which is run for that with these numbers. If it fails, no other is tried."""
        inputs = self._inputs(numbers)
        batch = inputs.batch()
        drafts: Any = compiled_module("drafts")
        memory: Any = compiled_module("memory")
        predicted = Predicted(inputs.tokens.unsqueeze(1), torch.empty(numbers.count, 1), inputs.hidden)

        def run() -> Tensor:
            memory.take_rows(self._states, inputs.states, inputs.hidden)
            logits, hidden = self._model.draft(batch, inputs.hidden, self._kv)
            drafts.choose_drafts(logits, hidden, inputs.tokens, inputs.hidden, predicted.chances)
            return predicted.chances

        try:
            run()  # what a model computes once is no part of the program
            again, _ = capture(run)
        except Exception as error:
            self._capture = None
            log.warning("capturing the predictor failed (%s: %s); it is launched", type(error).__name__, error)
            return None
        if len(self._captured) == MAX_PASSES:
            self._captured.popitem(last=False)
        size = len(numbers.values)
        values = inputs.tokens.as_strided((size,), (1,)).numpy()  # of all integers, which begin with the tokens
        captured = self._captured[numbers.shape] = _Captured(values, inputs, batch, again, predicted)
        return captured
