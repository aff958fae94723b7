"""Allocators on a stack of free indices, used by every tree alike: their cost is the same. And an empty tree."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

Indices = np.ndarray[Any, Any]


class TokenAllocator:
    """Gives out an index for each token, in whole pages, as SGLang keeps them: torch tensors where torch is installed.

    Attributes:
        size: tokens in whole pages.
    """

    device = "cpu"

    def __init__(self, size: int, page: int) -> None:
        self.page = page
        self.size = size // page * page
        self.clear()

    def clear(self) -> None:
        """Everything is free."""
        self.stack = np.arange(self.size // self.page, 0, -1, dtype=np.int64)
        self.top = len(self.stack)

    def available_size(self) -> int:
        """Tokens in free pages."""
        return self.top * self.page

    def alloc(self, need: int) -> Any:
        """`[need]` indices; None, and nothing changed, where there are too few."""
        count = -(-need // self.page)
        if count > self.top:
            return None
        pages = self.stack[self.top - count : self.top].copy()
        self.top -= count
        if self.page > 1:
            pages = (pages[:, None] * self.page + np.arange(self.page)).reshape(-1)[:need]
        return as_tensor(pages)

    def free(self, indices: Any) -> None:
        pages = np.asarray(indices)
        if self.page > 1:
            pages = pages[:: self.page] // self.page
        assert self.top + len(pages) <= len(self.stack), "more is freed than was allocated"
        self.stack[self.top : self.top + len(pages)] = pages
        self.top += len(pages)

    # what SGLang calls of an allocator

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        self.free(indices)

    free_full_segment = free_segment

    def mamba_full_cache_donor(self) -> None:
        return None

    def schedulable_available_size(self) -> int:
        return self.top


def state_allocator(size: int) -> TokenAllocator:
    """Gives out indices of states."""
    return TokenAllocator(size, 1)


def as_tensor(indices: Indices) -> Any:
    """A tensor of torch where it is installed."""
    try:
        import torch
    except ImportError:
        return indices
    return torch.from_numpy(indices)


class EmptyTree:
    """A tree that never hits: what the benchmark itself costs. The smallest example of the interface."""

    name = "empty"
    unit = 1

    def __init__(self, page_size: int, kv_slots: int, state_slots: int) -> None:
        self.page = page_size
        self.kv, self.st = TokenAllocator(kv_slots, page_size), state_allocator(state_slots)

    def key(self, tokens: array[int]) -> array[int]:
        return tokens

    def match(self, key: array[int], num_tokens: int) -> tuple[int, None, None, int]:
        return 0, None, None, 0

    def indices(self, node: None) -> Any:
        return as_tensor(np.empty(0, np.int64))

    def insert(self, key: array[int], num_tokens: int, kv: Any, state: Any, previous: int) -> tuple[int, None, bool]:
        self.kv.free(kv[previous:])
        return 0, None, False

    def lock(self, node: None) -> None:
        return None

    def unlock(self, node: None, receipt: None) -> None:
        pass

    def evict(self, num_tokens: int, num_states: int) -> tuple[int, int]:
        return 0, 0

    evict_for_alloc = evict

    def check(self) -> None:
        pass

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(("kv_evictable", "kv_protected", "st_evictable", "st_protected"), 0)
