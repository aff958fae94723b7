"""Whether a disk works, and what it did."""

from __future__ import annotations

import errno
import math
import time
from dataclasses import dataclass

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that has no more room."""

FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds without an attempt after a failure, and after many."""


@dataclass
class DiskCounts:
    """What a disk did.

    Attributes:
        num_failures: writes and reads that failed.
        num_damaged: copies that were not what was written.
        num_late: reads that took longer than computing.
        bytes_refused: bytes that were worth keeping, and came while the disk failed or was behind.
        bytes_dropped: of segments that were dropped because others are worth more.
    """

    num_failures: int = 0
    num_damaged: int = 0
    num_late: int = 0
    bytes_refused: int = 0
    bytes_dropped: int = 0


class Health:
    """Whether the directory works: after a failure it is left alone for a while, longer each time.

    Attributes:
        failure: what failed last; None: it works.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._resumes_at = 0.0
        self._pause = FIRST_PAUSE

    def failed(self, error: BaseException) -> None:
        """Something failed."""
        self.failure = f"{type(error).__name__}: {error!s:.200}"
        self._resumes_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def ends(self) -> None:
        """It will never work: it is not tried again."""
        self._resumes_at = math.inf

    def works(self) -> None:
        """Something did not fail."""
        self.failure, self._pause = None, FIRST_PAUSE

    @property
    def is_paused(self) -> bool:
        """Whether it is too early for another attempt."""
        return self.failure is not None and time.monotonic() < self._resumes_at
