"""Digests of what the tree owns: they prove that contents have not changed since they were committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from hybrid.memory.contents import UnitContents
from hybrid.memory.copies import Contents

DIGEST_BYTES = 16


class Digests:
    """A digest of each page and checkpoint of the tree, taken when the tree becomes its owner.

    A caller that moves contents moves their digests; a unit that is evicted loses its digest.

    Args:
        contents: can be read.
    """

    def __init__(self, contents: UnitContents) -> None:
        self._contents = contents
        self._pages: dict[int, bytes] = {}
        self._checkpoints: dict[int, bytes] = {}

    def note_pages(self, pages: Iterable[int]) -> None:
        """Take digests of pages that the tree owns from now on."""
        for page in pages:
            self._pages[page] = _digest(self._contents.read_page(page))

    def note_checkpoint(self, slot: int) -> None:
        """Take the digest of a checkpoint that the tree owns from now on."""
        self._checkpoints[slot] = _digest(self._contents.read_checkpoint(slot))

    def forget(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Forget pages and checkpoints that were evicted."""
        for page in pages:
            self._pages.pop(page, None)
        for slot in slots:
            self._checkpoints.pop(slot, None)

    def move_pages(self, moves: dict[int, int]) -> None:
        """Follow pages that were moved, from a key to its value."""
        for old, new in moves.items():
            if old in self._pages:  # pages of requests have none
                self._pages[new] = self._pages.pop(old)

    def move_checkpoints(self, moves: dict[int, int]) -> None:
        """Follow checkpoints that were moved, from a key to its value."""
        for old, new in moves.items():
            self._checkpoints[new] = self._checkpoints.pop(old)

    def is_page_intact(self, page: int) -> bool:
        """Tell whether a page holds what it held when the tree became its owner."""
        return self._pages.get(page) == _digest(self._contents.read_page(page))

    def is_checkpoint_intact(self, slot: int) -> bool:
        """Tell whether a checkpoint holds what it held when the tree became its owner."""
        return self._checkpoints.get(slot) == _digest(self._contents.read_checkpoint(slot))


def _digest(contents: Contents) -> bytes:
    return hashlib.blake2b(contents, digest_size=DIGEST_BYTES).digest()
