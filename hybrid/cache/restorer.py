"""Bringing contents into the cache: everything of one boundary, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hybrid.cache.allocator import Allocator
from hybrid.cache.commit import Committer
from hybrid.cache.lease import Lease
from hybrid.cache.opener import Opener
from hybrid.key import Key
from hybrid.memory.copies import Contents, Uploads
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint, Kind, NodeUsage


class RestoreOutcome(Enum):
    """The outcome of restoring a boundary."""

    RESTORED = "restored"
    PRESENT = "the cache has it already"
    NO_MEMORY = "there is no memory for it"
    INCOMPLETE = "pages before it are missing"
    NOT_FINITE = "it holds NaN or infinity"


@dataclass(frozen=True)
class Boundary:
    """A position at which requests can resume, with all that they need there.

    Attributes:
        key: begins with all tokens up to it.
        num_tokens: its position.
        pages: contents of the last pages up to it. The cache must have those before.
        checkpoint: contents of the checkpoint at its end, as it is stored.
        kind, turn, priority: of the checkpoint.
        past: how a checkpoint was used that was there before; None: there was none.
    """

    key: Key
    num_tokens: int
    pages: Sequence[Contents]
    checkpoint: Contents
    kind: Kind
    turn: int = 0
    priority: int = 0
    past: NodeUsage | None = None


class Restorer:
    """Restores boundaries into memory that is private until everything is there, and inserts it then.

    Whatever raises on the way leaves the tree as it was.

    Args:
        opener: opens a lease, which owns the memory meanwhile.
        committer: inserts it.
        allocator: allocates more where a lease has too little.
        memory: contents are written to it. It must have a mover that writes them.
    """

    def __init__(self, opener: Opener, committer: Committer, allocator: Allocator, memory: CacheMemory) -> None:
        self._opener = opener
        self._committer = committer
        self._allocator = allocator
        self._memory = memory

    def restore(self, boundary: Boundary) -> tuple[RestoreOutcome, int]:
        """Bring in what the cache lacks of a boundary.

        Returns:
            What became of it, and how many pages were written.
        """
        found = self._opener.tree.peek(boundary.key, boundary.num_tokens)
        lease = self._opener.hold(boundary.key, found, boundary.num_tokens)
        if lease is None:
            return RestoreOutcome.NO_MEMORY, 0
        try:
            missing = len(lease.private_pages)
            if lease.front_tokens == boundary.num_tokens:
                return RestoreOutcome.PRESENT, 0
            outcome = self.fill(lease, boundary)
            self.arrivals.wait_for_all()
            return outcome, missing if outcome is RestoreOutcome.RESTORED else 0
        finally:
            self._opener.close(lease)

    @property
    def arrivals(self) -> Uploads:
        """The uploads that were written, and are on their way."""
        return self._memory.uploads

    def fill(self, lease: Lease, boundary: Boundary) -> RestoreOutcome:
        """Write what a lease lacks up to a boundary beyond its hit into its own pages, and insert them with the
        checkpoint, if all of it is finite. On a GPU contents are on their way then (`hybrid.memory.copies`). Otherwise
        the lease is as it was, but for contents of its private pages, which it has not computed yet.
        """
        page_size = self._opener.tree.page_size
        end = boundary.num_tokens // page_size
        num_missing = end - lease.num_shared
        if num_missing > len(boundary.pages):
            return RestoreOutcome.INCOMPLETE
        missing = boundary.pages[len(boundary.pages) - num_missing :] if num_missing > 0 else ()
        if not self._memory.are_finite(missing, boundary.checkpoint):
            return RestoreOutcome.NOT_FINITE
        if end > len(lease.block_table):
            more = self._allocator.allocate_pages(end - len(lease.block_table))
            if more is None:
                return RestoreOutcome.NO_MEMORY
            self._allocator.give_pages(lease, more)
        place = self._allocator.allocate_new_checkpoint()
        if place is None:
            return RestoreOutcome.NO_MEMORY
        try:
            self._memory.contents.write(lease.block_table[lease.num_shared : end], missing, place, boundary.checkpoint)
        except BaseException:
            self._allocator.free_checkpoint(place)
            raise
        if boundary.past is not None:
            lease.lost.setdefault(boundary.num_tokens, boundary.past)
        kind, is_spare = boundary.kind, boundary.kind is Kind.INTERVAL
        stored = Checkpoint(place, boundary.num_tokens, kind, boundary.priority, boundary.turn, is_spare, lease.tenant)
        self._committer.adopt(lease, boundary.key, stored)
        return RestoreOutcome.RESTORED
