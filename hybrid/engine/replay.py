"""The states after accepted drafts, computed once more from the log of the pass that has verified them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

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


NOTHING = Replay([], [0], [], [])
"""No draft was accepted."""


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

    It reads the rows of the pass where they are, so that one capture serves whatever is accepted. It is for chains: an
    accepted draft that reads no slot continues from the row before it. Rows that are not accepted keep nothing, and a
    GPU does not compute those of them whose run reads no slot.

    Args:
        rows: number of rows of the pass. The first one is no draft.
        runs: of the pass.
        device: of the pass.
        run: computes the states, given the `StateSteps`.
        capture: captures it, in memory that the pass does not use.
    """

    def __init__(
        self, rows: int, runs: int, device: torch.device, run: Callable[[StateSteps], None], capture: Capture
    ) -> None:
        self._rows = rows
        # one before, between and after chains, of which there are no more than half the runs, rounded up, and rows;
        # an odd number where rows are even, as they never may be as many
        self._runs = runs + 3
        self._numbers = self._of(NOTHING).to(device)
        self._steps = StateSteps(*self._numbers.split((self._runs + 1, rows, rows)))
        self._launch = run
        self._capture: Capture | None = capture
        self._run: Callable[[], Tensor | None] = self._launched

    def keep(self, replay: Replay) -> None:
        """Keep the states after these drafts."""
        if self._capture is not None:
            self._record(self._capture)
        self._numbers.copy_(on_device(self._of(replay), self._numbers.device))
        self._run()

    def _of(self, replay: Replay) -> Tensor:
        """The numbers of the `StateSteps`: a run for each chain that is accepted, and for the rows in between."""
        read, write = [-1] * self._rows, [-1] * self._rows
        read[0] = EMPTY_STATE  # there is no row before it
        is_kept = [False] * self._rows
        for row, source, target in zip(replay.rows, replay.read, replay.write, strict=True):
            read[row], write[row], is_kept[row] = source, target, True
        starts = [
            row for row in range(self._rows) if read[row] >= 0 or (not is_kept[row] and (is_kept[row - 1] or row == 1))
        ]
        return torch.tensor(starts + [self._rows] * (self._runs + 1 - len(starts)) + read + write)

    def _record(self, capture: Capture) -> None:
        """Capture it, while nothing is kept."""
        self._capture = None
        self._numbers.copy_(self._of(NOTHING))
        try:
            self._run, _ = capture(self._launched)
        except Exception as error:
            log.warning("capturing a replay failed (%s: %s); it is launched", type(error).__name__, error)

    def _launched(self) -> Tensor:
        self._launch(self._steps)
        return self._numbers
