"""An exception at any line of our code: what memory that Python does not get raises, or a bug."""

import linecache
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import hybrid
from support.lines import traced


class PlantedError(Exception):
    """It is not expected anywhere."""


class Planted:
    """Raises at one of the lines that are run while it traces.

    Args:
        line: how many lines are run up to the one that raises.
        places: files and folders whose lines count, within the package.
        rings: called instead of raising.
        spares_locks: the lines of `with` and of `try` do not count: nothing raises between a lock and what it guards,
            and `try` does nothing.

    Attributes:
        was_raised: it has raised.
    """

    def __init__(
        self, line: int, *places: str, rings: Callable[[], None] | None = None, spares_locks: bool = False
    ) -> None:
        self.was_raised = False
        self._left = line
        self._rings = rings
        self._spares_locks = spares_locks
        self._places = tuple(str(Path(hybrid.__file__).parent / place) for place in places)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._places) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._left -= event == "line" and not (self._spares_locks and _begins_block(frame))
        if not self._left:
            self._left, self.was_raised = -1, True
            if self._rings is None:
                raise PlantedError
            self._rings()
        return self._line

    def traced(self) -> AbstractContextManager[None]:
        """Trace this thread."""
        return traced(self)


def _begins_block(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))
