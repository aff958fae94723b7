"""Digests of what the tree owns: they prove that contents have not changed since they were committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

DIGEST_BYTES = 16

Contents = bytes | bytearray | memoryview
"""The contents of a page or a checkpoint."""


@runtime_checkable
class ContentReader(Protocol):
    """Reads the contents of a memory."""

    def read_page(self, page: int) -> Contents:
        """Read the bytes of a page."""
        ...

    def read_checkpoint(self, slot: int) -> Contents:
        """Read the bytes of a checkpoint: of a state slot, or of the place of a stored checkpoint."""
        ...


@runtime_checkable
class ContentWriter(ContentReader, Protocol):
    """Also writes them: what a reader has read, into another page or checkpoint of this memory or of one like it."""

    def page_layout(self) -> str:
        """Describe what a page holds, as a text. Contents go from one memory to another where these texts are equal."""
        ...

    def checkpoint_layout(self) -> str:
        """Describe what a checkpoint holds, likewise."""
        ...

    def write_page(self, page: int, contents: Contents) -> None:
        """Write what `read_page` has read."""
        ...

    def write_checkpoint(self, slot: int, contents: Contents) -> None:
        """Write what `read_checkpoint` has read."""
        ...


@runtime_checkable
class ContentChecker(Protocol):
    """A reader that knows what contents can be those of its pages and checkpoints. Contents of others are believed.

    Attributes:
        page_bytes, checkpoint_bytes: bytes of what it reads and writes.
    """

    @property
    def page_bytes(self) -> int: ...

    @property
    def checkpoint_bytes(self) -> int: ...

    def are_finite(self, pages: Iterable[Contents], checkpoint: Contents | None) -> bool:
        """Tell whether no number in contents is NaN or infinity (None: there is no checkpoint). Where many are so large
        that their sum is, they count as such, too: a model does not compute them."""
        ...


class Digests:
    """A digest of each page and checkpoint of the tree, taken when the tree becomes its owner.

    A caller that moves contents moves their digests; a unit that is evicted loses its digest.

    Args:
        reader: reads the contents.
    """

    def __init__(self, reader: ContentReader) -> None:
        self._reader = reader
        self._pages: dict[int, bytes] = {}
        self._checkpoints: dict[int, bytes] = {}

    def note_pages(self, pages: Iterable[int]) -> None:
        """Take digests of pages that the tree owns from now on."""
        for page in pages:
            self._pages[page] = _digest(self._reader.read_page(page))

    def note_checkpoint(self, slot: int) -> None:
        """Take the digest of a checkpoint that the tree owns from now on."""
        self._checkpoints[slot] = _digest(self._reader.read_checkpoint(slot))

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
        return self._pages.get(page) == _digest(self._reader.read_page(page))

    def is_checkpoint_intact(self, slot: int) -> bool:
        """Tell whether a checkpoint holds what it held when the tree became its owner."""
        return self._checkpoints.get(slot) == _digest(self._reader.read_checkpoint(slot))


def _digest(contents: Contents) -> bytes:
    return hashlib.blake2b(contents, digest_size=DIGEST_BYTES).digest()
