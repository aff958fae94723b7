"""Passes of a checkpoint's predictor over one token of each of some requests, captured where decode steps are."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.batch import Batch, Group
from hybrid.engine.capture import Capture
from hybrid.engine.cuda_graphs import CapturedModel
from hybrid.engine.padding import Padding

log: logging.Logger = logging.getLogger(__name__)

MAX_PASSES = 64
"""Captured passes that are kept, at most; the one that was not used for longest goes."""


class PredictorInputs(NamedTuple):
    """What a pass of the predictor reads, for N requests.

    Attributes:
        tokens: `[N]` the tokens.
        positions: `[N]` their rotary positions.
        slots: `[N]` where their keys and values are written; -1: nowhere.
        lengths: `[N]` of the sequences up to there.
        block_table: `[N, max_pages]`.
        hidden: `[N, hidden_size]` the hidden states before them.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    block_table: Tensor
    hidden: Tensor

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


class _Captured(NamedTuple):
    """A captured pass: what it reads, what runs it, and what it writes."""

    inputs: PredictorInputs
    batch: Batch
    run: Callable[[], None]
    logits: Tensor
    hidden: Tensor


class PredictorPasses:
    """Runs passes of the predictor.

    Args:
        model: has a predictor.
        kv: the pages.
        capture: captures passes; None: each is launched kernel by kernel.
    """

    def __init__(self, model: Any, kv: Tensor, capture: Capture | None = None) -> None:
        self._model = model
        self._kv = kv
        self._capture = capture
        self._captured: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()  # in the order in which they were used
        self._captured_model = CapturedModel(model)

    @property
    def num_captured(self) -> int:
        """Number of passes that are captured."""
        return len(self._captured)

    def width(self, num_pages: int) -> int:
        """Columns of a block table of this many pages, such that few widths occur where passes are captured."""
        return num_pages if self._capture is None else Padding.of(1, num_pages).width

    def run(self, inputs: PredictorInputs) -> tuple[Tensor, Tensor]:
        """`[N, vocab]` fp32 logits of the token after each, and the predictor's hidden states `[N, hidden_size]`, both
        valid until the next pass, which may read them."""
        captured = self._of(inputs) if self._capture is not None and not self._captured_model.is_hooked else None
        if captured is None:
            logits, hidden = self._model.draft(inputs.batch(), inputs.hidden, self._kv)
            return logits, hidden
        for own, given in zip(captured.inputs, inputs, strict=True):
            own.copy_(given)
        captured.run()
        return captured.logits, captured.hidden

    def _of(self, inputs: PredictorInputs) -> _Captured | None:
        """The captured pass of this shape."""
        shape = tuple(inputs.block_table.shape)
        captured = self._captured.get(shape)
        if captured is not None:
            self._captured.move_to_end(shape)
        elif self._capture is not None:
            captured = self._record(self._capture, shape, inputs)
        return captured

    def _record(self, capture: Capture, shape: tuple[int, ...], inputs: PredictorInputs) -> _Captured | None:
        """Capture a pass of this shape, which is run for that with these inputs. If it fails, no other is tried."""
        own = PredictorInputs(*(given.clone() for given in inputs))
        batch, hidden = own.batch(), own.hidden

        def run() -> Tensor:
            nonlocal hidden
            logits: Tensor
            logits, hidden = self._model.draft(batch, own.hidden, self._kv)
            return logits

        try:
            again, logits = capture(run)
        except Exception as error:
            self._capture = None
            log.warning("capturing the predictor failed (%s: %s); it is launched", type(error).__name__, error)
            return None
        if len(self._captured) == MAX_PASSES:
            self._captured.popitem(last=False)
        captured = self._captured[shape] = _Captured(own, batch, again, logits, hidden)
        return captured
