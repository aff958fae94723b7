"""What follows when an unexpected exception comes out of the bookkeeping.

Allocations may fail and copies may raise, and the bookkeeping is whole afterwards. An exception between any other two
lines (memory that Python itself does not get, a bug) may leave a page with two owners, or none, and what is served from
then on could be wrong. So after an unexpected exception the cache is audited, and emptied where that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from hybrid.cache.lease import Lease
from hybrid.cache.tiers import Tiers
from hybrid.errors import ArgumentError, OwnershipError
from hybrid.tiers.tier import clear_inconsistent

log: logging.Logger = logging.getLogger(__name__)

ROOMS = ("hybrid.cache.", "hybrid.tree.", "hybrid.memory.", "hybrid.tiers.")
"""Where the bookkeeping is."""


class Audited(Protocol):
    """A cache."""

    @property
    def leases(self) -> Collection[Lease]:
        """Those that are open."""
        ...

    def check_owner(self) -> None:
        """Raise in another thread than the owner."""
        ...

    def audit(self) -> None:
        """Raise where it is inconsistent."""
        ...

    def close(self, lease: Lease) -> None:
        """Give back everything that a lease holds."""
        ...

    def reset(self) -> None:
        """Forget everything, leases and pins too."""
        ...


def is_unexpected(error: BaseException) -> bool:
    """Whether an exception came out of the bookkeeping, or through it. One that refuses an argument has changed
    nothing."""
    if isinstance(error, ArgumentError):
        return False
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith(ROOMS):
            return True
        traceback = traceback.tb_next
    return False


def mend(cache: Audited, error: BaseException, held: Collection[Lease | None] = ()) -> bool:
    """Empty a cache that an exception has left inconsistent. Returns whether it has: all its leases have ended then,
    and are not to be closed.

    Args:
        error: the exception.
        held: the leases that have an owner. Others are closed: the exception came before the owner got them, or while
            they were closed.
    """
    if not is_unexpected(error):
        return False
    with suppress(OwnershipError):
        cache.check_owner()
        try:
            for lease in [lease for lease in cache.leases if lease not in held]:
                cache.close(lease)
            cache.audit()
            return False
        except Exception as wrong:
            log.error(
                "the cache is emptied, since its bookkeeping is inconsistent after %s: %s; %s",
                type(error).__name__,
                error,
                wrong,
            )
        cache.reset()
        return True
    return False


def abandon(leases: Iterable[Lease], tiers: Tiers | None) -> None:
    """Leases end without giving back what they hold, and tiers that are inconsistent forget their copies."""
    for lease in leases:
        if lease.restoring is not None:
            lease.restoring.drop()
            lease.restoring = None
    clear_inconsistent(tiers.places if tiers is not None else ())
