"""The mending of a cache after an exception came out of the bookkeeping of a step."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from types import TracebackType

from hybrid.cache.cache import HybridCache
from hybrid.cache.lease import Lease
from hybrid.errors import ArgumentError, OwnershipError

ROOMS = ("hybrid.cache.", "hybrid.tree.", "hybrid.memory.", "hybrid.tiers.")
"""Modules of the bookkeeping."""


def is_unexpected(error: BaseException) -> bool:
    """Tell whether an exception came out of the bookkeeping, or through it. One that refuses an argument has changed
    nothing."""
    if isinstance(error, ArgumentError):
        return False
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith(ROOMS):
            return True
        traceback = traceback.tb_next
    return False


def mend(cache: HybridCache, error: BaseException, held: Collection[Lease | None] = ()) -> bool:
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
        except Exception:
            cache.reset()
            return True
        if cache.reset_if_inconsistent(error):
            return True
        if any(lease is not None and lease not in cache.leases for lease in held):  # a call has emptied it before
            for lease in [*cache.leases]:
                cache.close(lease)
            return True
    return False
