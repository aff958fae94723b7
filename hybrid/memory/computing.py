"""A pass that other threads of a CPU compute on the memory of a cache, while the host schedules the next step.

A GPU does in order what it is given. Threads of a CPU do not: what reads or writes contents of pages and state slots
outside of a pass waits for the pass under way first (`Computing.settle`).
"""

from __future__ import annotations

from typing import Protocol


class UnderWay(Protocol):
    """A pass that was given to other threads."""

    def end(self) -> None:
        """Wait until it has ended. Whether it failed is known to who reads its results."""
        ...


class Computing:
    """What other threads compute on a memory: passes one after another, of which the latest is known."""

    def __init__(self) -> None:
        self._latest: UnderWay | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a pass was begun that nothing has waited for here."""
        return self._latest is not None

    def begin(self, latest: UnderWay) -> None:
        """A pass was given to other threads. When it ends, those before it have."""
        self._latest = latest

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._latest is not None:
            self._latest.end()
            self._latest = None
