"""The thread that owns a cache, in the process in which it became the owner."""

from __future__ import annotations

import os
import threading
from typing import NoReturn

from hybrid.errors import OwnershipError


def refuse_copy(owner: object) -> NoReturn:
    """For the `__reduce_ex__` of what cannot be copied or pickled.

    Raises:
        OwnershipError: always.
    """
    raise OwnershipError(
        f"{type(owner).__name__} cannot be copied or pickled: its memory has one owner. Engine.with_cache makes one "
        "more on the same weights; another process loads the checkpoint itself, and may load what this one has saved"
    )


class Owner:
    """At most one thread: the first that claims, until another adopts. In a process that is forked later it is none of
    the threads: those of PyTorch do not exist there, and a pass may wait for them for ever."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._process = 0
        self._claiming = threading.RLock()  # a signal handler may claim, too

    def adopt(self) -> None:
        """Make the calling thread the owner."""
        self._process = os.getpid()
        self._thread = threading.get_ident()

    def claim(self) -> None:
        """Make the calling thread the owner, if there is none.

        Raises:
            OwnershipError: another thread is the owner.
        """
        if self._thread != threading.get_ident() or self._process != os.getpid():
            with self._claiming:  # of two threads that come together, one becomes the owner
                if self._thread is None:
                    self.adopt()
            self.check()

    def check(self) -> None:
        """Check that no other thread is the owner.

        Raises:
            OwnershipError: one is, or one of the process that this one was forked from.
        """
        if self._thread is None:
            return
        if self._process != os.getpid():
            raise OwnershipError(
                "this process was forked from the one that owns this cache, and does not have its threads, for which a "
                "pass may wait for ever. Load the model in this process, or start processes with 'spawn'; adopt() "
                "makes the calling thread the owner of this process's copy"
            )
        if self._thread != threading.get_ident():
            raise OwnershipError(
                "another thread owns this cache; only stats() may be called from here. To hand the cache over, call "
                "adopt() in the thread that is to own it"
            )
