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
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.memory.device import on_device
from hybrid.memory.pool import EMPTY_STATE

log: logging.Logger = logging.getLogger(__name__)

Log = list[tuple[Tensor, ...]]
"""The log of a pass: `Batch.log`."""


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
    accepted draft that reads no slot continues from the row before it. Rows that are not accepted keep nothing: a CPU
    leaves them out, and a GPU does not compute those of them whose run reads no slot.

    Args:
        rows: number of rows of the pass. The first one is not a draft.
        runs: of the pass; None: what computes it knows by the slots that are read where a run starts.
        device: of the pass.
        run: computes the states, given the `StateSteps`.
        capture: captures it, in memory that the pass does not use.
    """

    def __init__(
        self, rows: int, runs: int | None, device: torch.device, run: Callable[[StateSteps], None], capture: Capture
    ) -> None:
        # the first row, each chain, of which there are no more than half as many as runs or rows, and what is between
        # them; another number than that of rows, as these would have one row each
        count = runs + 3 if runs is not None else rows
        host = torch.arange(count + 1 + 2 * rows)
        numbers = host.numpy()  # the same memory: to write some numbers takes a tenth of the time
        self._starts = numbers[: count + 1] if runs is not None else None
        self._slots = numbers[count + 1 :].reshape(2, rows)
        self._nothing = np.full((2, rows), -1)
        if runs is None:
            self._nothing[0] = LEFT_OUT
        else:
            self._nothing[0, 0] = EMPTY_STATE  # there is no row before it
        self._host, self._numbers = host, host.to(device)
        self._steps = StateSteps(*self._numbers.split((count + 1, rows, rows)))
        self._launch = run
        self._capture: Capture | None = capture
        self._run: Callable[[], Tensor | None] = self._launched

    def keep(self, replay: Replay) -> None:
        """Keep the states after these drafts."""
        if self._capture is not None:
            self._write(NOTHING)
            self._record(self._capture)
        self._write(replay)
        self._run()

    def _write(self, replay: Replay) -> None:
        """Write the numbers of the `StateSteps`: a run for each chain that is accepted, and for the rows in between."""
        self._slots[:] = self._nothing
        reads, writes = self._slots
        for row, read, write in zip(replay.rows, replay.read, replay.write, strict=True):
            reads[row], writes[row] = read, write
        if self._starts is not None:
            is_kept = np.zeros(self._slots.shape[1], np.bool_)
            is_kept[replay.rows] = True
            starts = self._slots[0] >= 0
            starts[1:] |= ~is_kept[1:] & is_kept[:-1]
            starts[1:2] |= ~is_kept[1:2]  # the first row is a run by itself
            found = np.flatnonzero(starts)
            self._starts[: len(found)] = found
            self._starts[len(found) :] = len(starts)
        if self._numbers is not self._host:
            self._numbers.copy_(on_device(self._host, self._numbers.device))

    def _record(self, capture: Capture) -> None:
        """Capture it, while nothing is kept."""
        self._capture = None
        try:
            self._run, _ = capture(self._recorded)
        except Exception as error:
            log.warning("capturing a replay failed (%s: %s); it is launched", type(error).__name__, error)

    def _launched(self) -> Tensor:
        """Launch it without a capture. Rows are not left out then: they read the empty state."""
        read = self._steps.read
        self._launch(self._steps._replace(read=torch.where(read == LEFT_OUT, EMPTY_STATE, read)))
        return self._numbers

    def _recorded(self) -> Tensor:
        self._launch(self._steps)
        return self._numbers
