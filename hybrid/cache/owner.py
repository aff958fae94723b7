"""The thread that owns a cache."""

from __future__ import annotations

import threading

from hybrid.errors import OwnershipError


class Owner:
    """At most one thread: the first that claims, until another adopts."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._claiming = threading.RLock()  # a signal handler may claim, too

    def adopt(self) -> None:
        """Make the calling thread the owner."""
        self._thread = threading.get_ident()

    def claim(self) -> None:
        """Make the calling thread the owner, if there is none.

        Raises:
            OwnershipError: another thread is the owner.
        """
        if self._thread is None:
            with self._claiming:  # of two threads that come together, one becomes the owner
                if self._thread is None:
                    self._thread = threading.get_ident()
        self.check()

    def check(self) -> None:
        """Check that no other thread is the owner.

        Raises:
            OwnershipError: one is.
        """
        if self._thread is not None and self._thread != threading.get_ident():
            raise OwnershipError(
                "another thread owns this cache; only stats() may be called from here. To hand the cache over, call "
                "adopt() in the thread that is to own it"
            )
