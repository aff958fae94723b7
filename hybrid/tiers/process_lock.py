"""A lock between the threads of one process."""

from __future__ import annotations

import os
import threading

FORKED = "this process was forked from the one that opened the directory"
"""Why threads are not used."""


class ProcessLock:
    """A lock between the threads of the process that makes it.

    In a process that is forked from it those threads do not exist, and one of them may have held the lock: there it is
    not held by anyone, and does nothing. The other methods are those of `threading.Lock`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the one that made it."""
        return self._process != os.getpid()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock.acquire`."""
        return blocking if self.is_foreign else self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """See `threading.Lock.release`."""
        if not self.is_foreign:
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()
