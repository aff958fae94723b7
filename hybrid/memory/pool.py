"""The free indices of a pool."""

from collections.abc import Iterable

from hybrid.errors import OwnershipError

EMPTY_STATE = 0
"""The state slot of the empty prefix: zeros, read by every cold request, never written, owned by no request."""


class IndexPool:
    """The free indices of a pool of pages or of state slots.

    Args:
        size: indices 0 .. size - 1.
        reserved: the first `reserved` indices are never allocated.
        name: what the indices are, for messages ("page").

    Attributes:
        per_piece: each index is a piece of its own (`hybrid.memory.arena`).
    """

    per_piece = 1

    def __init__(self, size: int, reserved: int, name: str) -> None:
        self.size = size
        self.reserved = reserved
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Free all indices, whatever they were."""
        self._free = list(range(self.size - 1, self.reserved - 1, -1))  # allocated from the lowest
        self._is_free = bytearray(self.reserved) + bytearray(b"\x01") * (self.size - self.reserved)

    @property
    def num_free(self) -> int:
        """Number of free indices."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of indices that are allocated."""
        return self.capacity - len(self._free)

    @property
    def capacity(self) -> int:
        """Number of indices that can be allocated."""
        return self.size - self.reserved

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` indices; None, and nothing is taken, when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for index in taken:
            self._is_free[index] = 0
        return taken

    def free(self, indices: Iterable[int]) -> None:
        """Give indices back.

        Raises:
            OwnershipError: one is free already or was never allocated. None of them was freed.
        """
        back = list(indices)
        for index in back:
            if not self.reserved <= index < self.size or self._is_free[index]:
                raise OwnershipError(f"{self._name} {index} is freed, but it is free already or reserved")
        if len(set(back)) != len(back):
            raise OwnershipError(f"a {self._name} is freed twice in one call: {sorted(back)}")
        for index in back:
            self._is_free[index] = 1
        self._free.extend(reversed(back))

    def indices(self) -> Iterable[int]:
        """List all indices that can be allocated."""
        return range(self.reserved, self.size)

    def free_indices(self) -> tuple[int, ...]:
        """List all free indices, for the audit: one that is free twice is there twice."""
        return tuple(self._free)
