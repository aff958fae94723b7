"""The cost of something in lines of our code: the same on every machine, however busy it is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hybrid

ROOT = Path(hybrid.__file__).parent.parent
PACKAGE = tuple(f"{ROOT / room}/" for room in ("hybrid", "kernels", "models"))


class TooManyLinesError(BaseException):
    """Not an `Exception`: no code under test takes it for an error of its own."""


class Lines:
    """Lines of the package that were run in this thread.

    Args:
        limit: the line after this many raises.
    """

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        if self.count > self._limit:
            raise TooManyLinesError(f"more than {self._limit} lines")
        return self._line


@contextmanager
def traced(tracer: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Trace this thread."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def counted_lines(limit: int = sys.maxsize) -> Iterator[Lines]:
    """Count the lines that are run. What C code does is not seen: a loop in Python is."""
    lines = Lines(limit)
    with traced(lines):
        yield lines
