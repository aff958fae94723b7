"""Our tree behind the interface of `operations.py`, whose docstring says what each call does.

It evicts the least recently used and has no ghosts, as its peers. KV indices are page ids here: one entry of an index
array stands for a page.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from slots import Slots

from hybrid.cache.allocator import Allocator
from hybrid.cache.audit import audit
from hybrid.cache.pins import Pins
from hybrid.cache.stats import CacheStats
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint, Lock, Node, Released
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree

GRID = 32  # where the benchmark puts states: its smallest step. Engines have 64


class HybridTree:
    """A `hybrid.tree.Tree` with allocators of its own, for pages of `page_size` tokens with `kv_slots` tokens in all,
    and for `state_slots` states, which may be at every end of a page: the benchmark puts them 32 tokens apart."""

    joined = staticmethod(np.concatenate)

    def __init__(self, page_size: int, kv_slots: int, state_slots: int) -> None:
        self.page = self.unit = page_size
        self.kv, self.st = Slots(kv_slots, page_size, first=0), Slots(state_slots)
        self.tree = Tree(page_size, max(page_size, GRID), policy_of("lru"), max_ghosts=0)
        self._matched: tuple[Key | None, Node | None] = None, None  # what is locked while its key is inserted

    def key(self, tokens: array[int]) -> Key:
        return Key(np.frombuffer(tokens, dtype=np.int64).astype(np.int32).tobytes())

    def match(self, key: Key, num_tokens: int) -> tuple[int, Node | None, int | None]:
        found = self.tree.match(key, num_tokens)
        self._matched = key, found.checkpoint
        return found.num_tokens, found.checkpoint, found.branching_len

    def indices(self, node: Node | None) -> np.ndarray:
        return np.frombuffer(self.tree.pages(node, 0 if node is None else node.end), dtype=np.int32)

    def insert(self, key: Key, num_tokens: int, kv: np.ndarray, state: Any, previous: int) -> tuple[int, Node, bool]:
        pages, checkpoint = array("i", kv.tobytes()), Checkpoint(state.item(), num_tokens)
        below = self._matched[1] if self._matched[0] is key else None
        done = self.tree.insert(key, num_tokens, pages, checkpoint, below)
        if done.num_existing > previous:
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
        released = Released()
        if num_tokens:
            self.tree.evict_pages(-(-num_tokens // self.page), released)
        if num_states:
            self.tree.evict_checkpoints(num_states, released)
        if released.pages:
            self.kv.free(released.pages)
        if released.slots:
            self.st.free(released.slots)
        return len(released.pages) * self.page, len(released.slots)

    evict_for_alloc = evict  # what is evicted can be allocated at once

    def check(self) -> None:
        """The cache's own audit, on a memory in which is free what is free here. Nothing may be locked."""
        memory = CacheMemory.of_indices(self.kv.size // self.page, self.st.size)
        for pool, slots in ((memory.pages, self.kv), (memory.states, self.st)):
            pool.allocate(pool.capacity)
            pool.free(slots.free_ids())
        audit(self.tree, memory, [], Pins(self.tree, memory, Allocator(self.tree, memory, CacheStats())))
