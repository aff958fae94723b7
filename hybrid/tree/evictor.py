"""Eviction: takes from the tree what its policy ranks lowest, and returns it to the caller.

What has been evicted is in `released` at every moment, also when something raises in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hybrid.tree.candidates import Candidates
from hybrid.tree.forest import Forest
from hybrid.tree.ghosts import Ghosts
from hybrid.tree.node import EvictedCheckpoint, Kind, Node, Released
from hybrid.tree.pools import INTEGERS, Pools

MAX_RECENT = 2048
"""Evicted checkpoints that are remembered for pictures."""


class Evictor:
    """Evicts what no lock protects.

    Args:
        forest: the nodes to evict from.
        candidates: the order in which they are evicted.
        ghosts: remembers what was evicted.
        pools: whether edges are evicted as a whole, and what sees what is about to be evicted.
    """

    def __init__(self, forest: Forest, candidates: Candidates, ghosts: Ghosts, pools: Pools = INTEGERS) -> None:
        self._leaving = pools.leaving
        self._forest = forest
        self._candidates = candidates
        self._ghosts = ghosts
        self._whole_edges = pools.whole_edges
        self._recent: deque[tuple[int, int, Kind, int, int, int, int]] = deque(maxlen=MAX_RECENT)

    @property
    def recent(self) -> list[EvictedCheckpoint]:
        """The checkpoints that were evicted most recently, oldest first."""
        return [EvictedCheckpoint._make(one) for one in self._recent]

    def evict_pages(self, num_pages: int, released: Released) -> None:
        """Evict at least `num_pages` pages if possible: leaves in the order of the policy, each from its tail.

        A leaf that is cut loses its checkpoint. A leaf that is removed takes the childless tombstones above it along.
        """
        end = len(released.pages) + num_pages
        while len(released.pages) < end:
            leaf = self._next(self._candidates.next_leaf)
            if leaf is None:
                break
            self._evict(leaf, end - len(released.pages), released)

    def evict_checkpoints(self, num_checkpoints: int, released: Released) -> None:
        """Evict `num_checkpoints` checkpoints if possible, in the order of the policy. Their pages stay."""
        end = len(released.slots) + num_checkpoints
        while len(released.slots) < end:
            node = self._next(self._candidates.next_checkpoint)
            if node is None:
                break
            self._evict(node, 0, released)

    def evict_one(self, num_pages: int, released: Released) -> None:
        """Evict the candidate with the lowest rank: a checkpoint, or up to `num_pages` pages from the tail of a leaf
        that has none. Evicts nothing when everything is locked."""
        node = self._next(self._candidates.next_of_all)
        if node is not None:
            self._evict(node, 0 if node.slot is not None else num_pages, released)

    def _next(self, find: Callable[[], Node | None]) -> Node | None:
        if self._candidates.failure is not None:
            self._candidates.settle(self._forest.nodes())
        return find()

    def _evict(self, node: Node, num_pages: int, released: Released) -> None:
        """Take `num_pages` pages from the tail of a leaf that was removed from the candidates; 0: its checkpoint."""
        if self._whole_edges and not node.children and not node.page_locks:
            num_pages = node.num_pages
        try:
            if num_pages == 0:
                if node.slot is not None:
                    self._drop_checkpoint(node, released)
                if node.children:
                    if self._candidates.follows_changes:
                        self._candidates.reweigh_below(node)
                    self._forest.join(node)
                else:
                    self._candidates.enter(node, renewed=True)  # its pages may still be evicted
            elif num_pages < (own_pages := node.num_pages):
                if node.slot is not None:
                    self._drop_checkpoint(node, released)
                self._remember(node, own_pages - num_pages)
                self._forest.cut(node, num_pages, released.pages)
                self._candidates.enter(node, renewed=True)
            else:
                self._remove(node, released)
        except BaseException:
            self._candidates.enter(node)
            raise

    def _remove(self, leaf: Node, released: Released) -> None:
        node = leaf
        while True:
            if node.slot is not None:
                self._drop_checkpoint(node, released)
            self._remember(node, 0)
            parent = self._forest.remove(node, released.pages)
            if self._whole_edges:
                usage, gone = parent.usage, node.usage
                usage.pages_used = max(usage.pages_used, gone.last_used, gone.pages_used)
            if parent.children:
                if len(parent.children) == 1:
                    if self._candidates.follows_changes:
                        self._candidates.reweigh_below(parent)
                    self._forest.join(parent)
                return
            if self._candidates.follows_changes:
                self._candidates.changed(parent)
            if parent.parent is None:  # the root
                return
            if parent.slot is not None or parent.page_locks or self._whole_edges:
                self._candidates.enter(parent)
                return
            node = parent

    def _remember(self, node: Node, num_kept: int) -> None:
        if self._leaving is not None:
            self._leaving.pages(node, num_kept)
        if self._ghosts.limit:
            try:
                self._ghosts.remember(node, num_kept * self._forest.page_size)
            except Exception:
                return  # eviction continues without this ghost

    def _drop_checkpoint(self, node: Node, released: Released) -> None:
        assert not node.state_locks
        if self._leaving is not None:
            self._leaving.checkpoint(node)
        candidates, usage = self._candidates, node.usage
        if candidates.reports_evictions:
            candidates.evicting(node)
        released.slots.append(node.slot)
        self._recent.append(
            (node.start, node.end, usage.kind, usage.hits, usage.stored_at, usage.used_at, candidates.now)
        )
        self._forest.drop_checkpoint(node)
