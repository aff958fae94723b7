"""The states after accepted drafts, computed once more from the log of the pass that has verified them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import StateSteps
from hybrid.engine.capture import Capture
from hybrid.memory.device import on_device
from hybrid.memory.pool import EMPTY_STATE

log: logging.Logger = logging.getLogger(__name__)

Log = list[tuple[Tensor, ...]]
"""Of a pass: `Batch.log`."""


class Replay(NamedTuple):
    """The accepted drafts of a pass. All are lists of integers.

    Attributes:
        rows: the drafts, among the decoded tokens of the pass.
        starts: where those of each request begin, and their number.
        read, write: as `StateSteps`.
    """

    rows: list[int]
    starts: list[int]
    read: list[int]
    write: list[int]


def replay_states(model: Any, log: Log, replay: Replay, state: dict[str, Tensor], device: torch.device) -> None:
    """Keep the states after accepted drafts.

    Args:
        model: has computed the pass.
        log: of the pass.
        replay: the drafts.
        state: the state slots, by name; written.
        device: of the model.
    """
    rows, *steps = (on_device(torch.tensor(numbers), device) for numbers in replay)
    model.replay(log, rows, StateSteps(*steps), state)


class ReplayOfAll:
    """Keeps the states after accepted drafts of a captured pass, by a captured replay.

    All rows of the pass are computed once more where they are, so that one capture serves whatever is accepted: rows
    that are not continue from the empty state, and what is after them is not kept. It is for chains: an accepted draft
    that reads no slot continues from the row before it.

    Args:
        rows: number of rows of the pass.
        run: computes the states of all rows, given their `StateSteps`.
        capture: captures it, in memory that the pass does not use.
    """

    def __init__(self, rows: int, run: Callable[[StateSteps], None], capture: Capture) -> None:
        self._nothing = np.array([[EMPTY_STATE] * rows, [-1] * rows])
        self._slots = torch.from_numpy(self._nothing.copy())
        self._numbers = self._slots.numpy()  # the same memory: to write some numbers takes a tenth of the time
        self._steps = StateSteps(torch.arange(rows + 1), *self._slots)
        self._launch = run
        self._capture: Capture | None = capture
        self._run: Callable[[], Tensor | None] = self._launched

    def keep(self, replay: Replay) -> None:
        """Keep the states after these drafts."""
        self._numbers[:] = self._nothing
        if self._capture is not None:
            self._record(self._capture)
        self._numbers[:, replay.rows] = replay.read, replay.write
        self._run()

    def _record(self, capture: Capture) -> None:
        """Capture it, while nothing is kept."""
        self._capture = None
        try:
            self._run, _ = capture(self._launched)
        except Exception as error:
            log.warning("capturing a replay failed (%s: %s); it is launched", type(error).__name__, error)

    def _launched(self) -> Tensor:
        self._launch(self._steps)
        return self._slots
