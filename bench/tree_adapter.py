"""Our tree behind the interface of the peers' `tree_bench.py`, whose docstring says what each call does.

    PYTHONPATH=bench python tree_bench.py tree_adapter:HybridTree     # evicts the least recently used, as its peers do
    PYTHONPATH=bench python tree_bench.py tree_adapter:LearnedTree    # evicts by the default policy of a cache

`bench/tree.py` runs it next to a peer. KV indices are page ids here: one entry of an index array stands for a page.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
from allocs import StateAlloc  # next to tree_bench.py

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import Checkpoint, Lock, Node, Released
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree

GRID = 32
"""Where the benchmark puts states: multiples of 32, its smallest step. Engines have 64."""


class PageAlloc:
    """A stack of free page ids.

    Args:
        size: tokens that fit; a last page that is not whole is left out.
        page: tokens per page.
    """

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

    def free(self, pages: np.ndarray | list[int]) -> None:
        end = self._num_free + len(pages)
        assert end <= len(self._stack), "more pages are freed than were allocated"
        self._stack[self._num_free : end] = pages
        self._num_free = end


class HybridTree:
    """A `hybrid.tree.Tree` with allocators of its own.

    Checkpoints may be at every end of a page: the benchmark puts them 32 tokens apart.

    Args:
        page_size: tokens per page.
        kv_slots: tokens that fit into the pages.
        state_slots: how many states fit.
        policy: name of the eviction policy.
    """

    def __init__(self, page_size: int, kv_slots: int, state_slots: int, policy: str = "lru") -> None:
        self.name = f"hybrid-{policy}"
        self.page = self.unit = page_size
        self.kv = PageAlloc(kv_slots, page_size)
        self.st: Any = StateAlloc(state_slots)
        self.tree = Tree(page_size, max(page_size, GRID), policy_of(policy))

    # Reading

    def key(self, tokens: array[int]) -> Key:
        """The key of token ids of 64 bits."""
        return Key(np.frombuffer(tokens, dtype=np.int64).astype(np.int32).tobytes())

    def match(self, key: Key, num_tokens: int) -> tuple[int, Node | None, int | None, int]:
        """The usable hit, its node (None for the empty prefix), the branching length, and the page hit."""
        found = self.tree.match(key, num_tokens)
        return found.num_tokens, found.checkpoint, found.branching_len, found.num_page_tokens

    def indices(self, node: Node | None) -> np.ndarray:
        """Page ids from the root to the end of a node."""
        return np.frombuffer(self.tree.pages(node, 0 if node is None else node.end), dtype=np.int32)

    # Writing

    def insert(self, key: Key, num_tokens: int, kv: np.ndarray, state: Any, previous: int) -> tuple[int, Node, bool]:
        """Insert the pages and a state; frees the pages of `[previous, existing)`, which the tree had already.

        Args:
            num_tokens: whole pages.
            kv: page ids of `[0, num_tokens)`, of which those of `[0, previous)` are the tree's.
            state: the one slot.

        Returns:
            How many tokens existed, the node at the end, and whether the tree adopted the slot.
        """
        pages = array("i", kv.tobytes())
        done = self.tree.insert(key, num_tokens, pages, Checkpoint(int(state[0]), num_tokens))
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
        tokens = states = 0
        if num_tokens:
            tokens, states = self._free(self.tree.evict_pages(-(-num_tokens // self.page)))
        if num_states:
            more_tokens, more_states = self._free(self.tree.evict_checkpoints(num_states))
            tokens, states = tokens + more_tokens, states + more_states
        return tokens, states

    evict_for_alloc = evict  # what is evicted can be allocated at once

    def _free(self, released: Released) -> tuple[int, int]:
        self.kv.free(released.pages)
        self.st.free(np.array(released.slots, dtype=np.int64))
        return len(released.pages) * self.page, len(released.slots)

    # Checking

    def sizes(self) -> dict[str, int]:
        """Tokens and states that could be evicted, and those that a lock keeps, counted node by node."""
        kept: set[int] = set()
        pages: Counter[bool] = Counter()
        states: Counter[bool] = Counter()
        nodes = [node for _, node in self.tree.nodes()]
        for node in reversed(nodes):  # children before parents: a lock keeps the pages of everything above it
            if node.page_locks or id(node) in kept:
                kept |= {id(node), id(node.parent)}
            pages[id(node) in kept] += node.num_pages
            if node.slot is not None:
                states[node.state_locks > 0] += 1
        return {
            "kv_evictable": pages[False] * self.page,
            "kv_protected": pages[True] * self.page,
            "st_evictable": states[False],
            "st_protected": states[True],
        }

    def check(self) -> None:
        """Walk the tree.

        Raises:
            AssertionError: something is inconsistent; names everything that is.
        """
        wrong: list[str] = []
        page_bytes = self.page * TOKEN_BYTES
        pages: list[int] = []
        slots: list[int] = []
        for _, node in self.tree.nodes():
            name, parent = f"node ending at {node.end}", node.parent
            if parent is None or parent.children.get(node.edge[:page_bytes]) is not node:
                wrong.append(f"{name}: its parent does not find it by the first page of its edge")
            if not node.pages or len(node.edge) != len(node.pages) * page_bytes:
                wrong.append(f"{name}: an edge of {len(node.edge)} bytes owns {len(node.pages)} pages")
            if parent is not None and node.end != parent.end + len(node.pages) * self.page:
                wrong.append(f"{name}: starts at {parent.end} and does not end where its edge does")
            if not 0 <= node.state_locks <= node.page_locks or (node.state_locks and node.slot is None):
                wrong.append(f"{name}: {node.state_locks} locks on state {node.slot}, {node.page_locks} on pages")
            pages += node.pages
            slots += [] if node.slot is None else [node.slot]
        counted = self.tree.num_pages, self.tree.num_checkpoints
        if (len(pages), len(slots)) != counted:
            wrong.append(f"the tree counts {counted} pages and checkpoints, and has {len(pages)} and {len(slots)}")
        free = {"page": self.kv.free_indices() + pages, "state slot": self.st.stack[: self.st.top].tolist() + slots}
        for unit, indices in free.items():
            wrong += [f"{unit} {index} has two owners" for index, times in Counter(indices).items() if times > 1]
        assert not wrong, "the tree is inconsistent:\n" + "\n".join(f"  - {line}" for line in wrong)


class LearnedTree(HybridTree):
    """The same with the default policy of a cache: learned hit density."""

    def __init__(self, page_size: int, kv_slots: int, state_slots: int) -> None:
        super().__init__(page_size, kv_slots, state_slots, "lhd")
