"""The allocator under every tree alike, so that its cost is the same."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

Ids = np.ndarray[Any, Any]


class Slots:
    """A stack of free ids, from `first` on, for `size` tokens in pages of `page`; a last page that is not whole is left
    out."""

    def __init__(self, size: int, page: int = 1, first: int = 1) -> None:
        self.page = page
        self.size = size // page * page
        self._stack: Ids = np.arange(first, first + size // page, dtype=np.int32)
        self._num_free = len(self._stack)

    def available_size(self) -> int:
        """Tokens that fit into the free pages."""
        return self._num_free * self.page

    def free_ids(self) -> list[int]:
        return self._stack[: self._num_free].tolist()

    def alloc(self, num_tokens: int) -> Any:
        """Page ids for `num_tokens` tokens; None, and nothing changed, when there are too few."""
        left = self._num_free - -(-num_tokens // self.page)
        if left < 0:
            return None
        ids = self._stack[left : self._num_free].copy()
        self._num_free = left
        return ids

    def free(self, ids: Ids | array[int] | list[int]) -> None:
        end = self._num_free + len(ids)
        assert end <= len(self._stack), "more is freed than was allocated"
        self._stack[self._num_free : end] = ids
        self._num_free = end
