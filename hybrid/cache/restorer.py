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
from hybrid.memory.digests import Contents, ContentWriter
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Checkpoint, Kind


class Outcome(Enum):
    """What became of a boundary."""

    RESTORED = "restored"
    PRESENT = "the cache has it already"
    NO_MEMORY = "there is no memory for it"
    INCOMPLETE = "pages before it are missing"


@dataclass(frozen=True)
class Boundary:
    """A position at which requests can resume, with all that they need there.

    Attributes:
        key: all tokens up to it, and no more.
        pages: contents of the last pages up to it. The cache must have those before.
        checkpoint: contents of the checkpoint at its end, as it is stored.
        kind, turn, priority: of the checkpoint.
    """

    key: Key
    pages: Sequence[Contents]
    checkpoint: Contents
    kind: Kind
    turn: int = 0
    priority: int = 0


class Restorer:
    """Restores boundaries into memory that is private until everything is there, and inserts it then.

    Whatever raises on the way leaves the cache as it was.

    Args:
        opener: opens a lease, which owns the memory meanwhile.
        committer: inserts it.
        memory: the pools, and who writes contents.
        allocator: allocates places of stored checkpoints.
        writer: writes contents.
    """

    def __init__(
        self, opener: Opener, committer: Committer, memory: CacheMemory, allocator: Allocator, writer: ContentWriter
    ) -> None:
        self._opener = opener
        self._committer = committer
        self._memory = memory
        self._allocator = allocator
        self._writer = writer

    def restore(self, boundary: Boundary) -> tuple[Outcome, int]:
        """Bring in what the cache lacks of a boundary.

        Returns:
            What became of it, and how many pages were written.
        """
        key, num_tokens = boundary.key, len(boundary.key)
        held = self._opener.hold(key, num_tokens, num_tokens)
        if held is None:
            return Outcome.NO_MEMORY, 0
        lease, _ = held
        try:
            missing = lease.private_pages
            if lease.front_tokens == num_tokens:
                return Outcome.PRESENT, 0
            if len(missing) > len(boundary.pages):
                return Outcome.INCOMPLETE, 0
            for page, contents in zip(missing, boundary.pages[len(boundary.pages) - len(missing) :], strict=True):
                self._writer.write_page(page, contents)
            lease.turn, lease.priority = boundary.turn, boundary.priority
            outcome = self._insert(lease, boundary)
            return outcome, len(missing) if outcome is Outcome.RESTORED else 0
        finally:
            self._opener.close(lease)

    def _insert(self, lease: Lease, boundary: Boundary) -> Outcome:
        """Write the checkpoint, and insert it with its pages."""
        num_tokens = len(boundary.key)
        facts = num_tokens, boundary.kind, boundary.priority, boundary.turn
        if self._memory.stores_smaller:
            place = self._allocator.allocate_checkpoint()
            if place is None:
                return Outcome.NO_MEMORY
            try:
                self._writer.write_checkpoint(place, boundary.checkpoint)
            except BaseException:
                self._memory.checkpoints.free([place])
                raise
            self._committer.adopt(lease, boundary.key, Checkpoint(place, *facts))
            return Outcome.RESTORED
        self._writer.write_checkpoint(lease.front, boundary.checkpoint)
        lease.captured.append(Checkpoint(lease.front, *facts))
        lease.front, lease.front_tokens = EMPTY_STATE, num_tokens
        self._committer.commit(lease, boundary.key, num_tokens)
        return Outcome.RESTORED
