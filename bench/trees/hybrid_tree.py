"""Our tree behind the interface of `operations.py`, whose docstring says what each call does.

It evicts the least recently used, as its peers do. KV indices are page ids here: one entry of an index array stands for
a page.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from allocators import state_allocator

from hybrid.cache.allocator import Allocator
from hybrid.cache.audit import audit
from hybrid.cache.pins import Pins
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint, Lock, Node, Released
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree

GRID = 32  # where the benchmark puts states: its smallest step. Engines have 64


class PageAlloc:
    """A stack of free page ids, for `size` tokens in pages of `page`; a last page that is not whole is left out."""

    def __init__(self, size: int, page: int) -> None:
        self.page = page
        self.size = size // page * page
        self._stack = np.arange(size // page, dtype=np.int32)
        self._num_free = len(self._stack)

    def available_size(self) -> int:
        """Tokens that fit into the free pages."""
        return self._num_free * self.page

    def free_indices(self) -> list[int]:
        return self._stack[: self._num_free].tolist()

    def alloc(self, num_tokens: int) -> np.ndarray | None:
        """Page ids for `num_tokens` tokens; None, and nothing changed, when there are too few."""
        left = self._num_free - -(-num_tokens // self.page)
        if left < 0:
            return None
        pages = self._stack[left : self._num_free].copy()
        self._num_free = left
        return pages

    def free(self, pages: np.ndarray | array[int]) -> None:
        if not len(pages):
            return
        end = self._num_free + len(pages)
        assert end <= len(self._stack), "more pages are freed than were allocated"
        self._stack[self._num_free : end] = pages
        self._num_free = end


class HybridTree:
    """A `hybrid.tree.Tree` with allocators of its own, for pages of `page_size` tokens with `kv_slots` tokens in all,
    and for `state_slots` states, which may be at every end of a page: the benchmark puts them 32 tokens apart."""

    def __init__(self, page_size: int, kv_slots: int, state_slots: int) -> None:
        self.name = "hybrid-lru"
        self.page = self.unit = page_size
        self.kv = PageAlloc(kv_slots, page_size)
        self.st = state_allocator(state_slots)
        self.tree = Tree(page_size, max(page_size, GRID), policy_of("lru"))

    def key(self, tokens: array[int]) -> Key:
        return Key(np.frombuffer(tokens, dtype=np.int64).astype(np.int32).tobytes())

    def match(self, key: Key, num_tokens: int) -> tuple[int, Node | None, int | None, int]:
        """The usable hit, its node (None for the empty prefix), the branching length, and the page hit."""
        found = self.tree.match(key, num_tokens)
        return found.num_tokens, found.checkpoint, found.branching_len, found.num_page_tokens

    def indices(self, node: Node | None) -> np.ndarray:
        """Page ids from the root to the end of a node."""
        return np.frombuffer(self.tree.pages(node, 0 if node is None else node.end), dtype=np.int32)

    def insert(self, key: Key, num_tokens: int, kv: np.ndarray, state: Any, previous: int) -> tuple[int, Node, bool]:
        """Insert tokens, whole pages of them, and a state; frees the pages of `[previous, existing)`, which the tree
        had already. Returns how many tokens existed, the node at the end, and whether the tree adopted the state."""
        pages = array("i", kv.tobytes())
        done = self.tree.insert(key, num_tokens, pages, Checkpoint(state.item(), num_tokens))
        self.kv.free(kv[previous // self.page : done.num_existing // self.page])
        return done.num_existing, done.node, done.adopted

    def lock(self, node: Node | None) -> Lock | None:
        """Keep a node's pages, and its state where it has one. The empty prefix needs no lock."""
        if node is None:
            return None
        return self.tree.lock_pages(node) if node.slot is None else self.tree.lock_state(node)

    def unlock(self, node: Node | None, receipt: Lock | None) -> None:
        if receipt is not None:
            self.tree.unlock(receipt)

    def evict(self, num_tokens: int, num_states: int) -> tuple[int, int]:
        """Free at least `num_tokens` tokens, then `num_states` states. Returns how many of each were freed in all."""
        released = Released()
        self.tree.evict_pages(-(-num_tokens // self.page), released)
        self.tree.evict_checkpoints(num_states, released)
        self.kv.free(released.pages)
        if released.slots:
            self.st.free(np.array(released.slots, dtype=np.int64))
        return len(released.pages) * self.page, len(released.slots)

    evict_for_alloc = evict  # what is evicted can be allocated at once

    def sizes(self) -> dict[str, int]:
        """Tokens and states that could be evicted, and those that a lock keeps, as the tree counts them."""
        tree, locks = self.tree, self.tree.locks
        return {
            "kv_evictable": (tree.num_pages - locks.num_pages) * self.page,
            "kv_protected": locks.num_pages * self.page,
            "st_evictable": tree.num_checkpoints - locks.num_checkpoints,
            "st_protected": locks.num_checkpoints,
        }

    def check(self) -> None:
        """The cache's own audit, on a memory in which is free what is free here. Nothing may be locked."""
        memory = CacheMemory.of_indices(self.kv.size // self.page, self.st.size)
        for pool, free in ((memory.pages, self.kv.free_indices()), (memory.states, self.st.stack[: self.st.top])):
            pool.allocate(pool.capacity)
            pool.free([int(index) for index in free])
        audit(self.tree, memory, [], Pins(self.tree, memory, Allocator(self.tree, memory)))
