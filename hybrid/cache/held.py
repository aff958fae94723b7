"""State slots that cannot be evicted, by the piece of memory that they keep."""

from __future__ import annotations

from collections.abc import Iterable


class HeldSlots:
    """Counts, per piece of an arena, the slots in it that cannot be evicted now: those of requests, which are never
    moved, and those of locked checkpoints.

    Args:
        per_piece: slots in a piece.
        reserved: the first `reserved` slots are always held.

    Attributes:
        num_partial: pieces with a held slot in which other slots are free, or can be evicted.
    """

    def __init__(self, per_piece: int, reserved: int) -> None:
        self.num_partial: int = 0
        self._per_piece = per_piece
        self._held: dict[int, int] = {}
        for slot in range(reserved):
            self.add(slot)

    @property
    def num_pieces(self) -> int:
        """Pieces with a held slot."""
        return len(self._held)

    def keeps(self, piece: int) -> bool:
        """Tell whether a piece has a held slot."""
        return piece in self._held

    def add(self, slot: int) -> None:
        """A slot is held from now on."""
        piece = slot // self._per_piece
        count = self._held.get(piece, 0) + 1
        self._held[piece] = count
        self.num_partial += (count < self._per_piece) - (1 < count <= self._per_piece)

    def remove(self, slots: Iterable[int]) -> None:
        """Slots are not held any more."""
        for slot in slots:
            piece = slot // self._per_piece
            count = self._held.pop(piece) - 1
            if count:
                self._held[piece] = count
            self.num_partial += (0 < count < self._per_piece) - (count + 1 < self._per_piece)
