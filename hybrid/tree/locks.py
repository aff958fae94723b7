"""Locks on nodes, and how much they protect: counts that are kept up to date as locks come and go."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid.errors import LockError
from hybrid.tree.candidates import Candidates
from hybrid.tree.forest import MAX_CHANGED, Forest, LockedPathCounter
from hybrid.tree.node import Lock, Node, PageLock, StateLock


class Locks:
    """The locks of a tree.

    A lock on the pages of a node protects every page above it too. Locks of pins are counted among all locks, and once
    more by themselves.

    Args:
        forest: the nodes. They are cut where a lock ends, and joined where none does any more.
        candidates: what can be evicted: what is unlocked is.

    A lock that comes or goes is only noted; what locks protect is counted when that is asked for.
    """

    def __init__(self, forest: Forest, candidates: Candidates) -> None:
        self._forest = forest
        self._candidates = candidates
        self._pins: set[StateLock] = set()
        self._pinned: dict[Node, int] = {}  # nodes whose checkpoints are pinned, and by how many locks
        self._pages = LockedPathCounter(is_locked)
        self._pinned_pages = LockedPathCounter(self._pinned.__contains__)
        self._changed = self._pages.changed
        self._protected: set[Node] = set()  # whose checkpoints locks protect, as far as they were counted
        forest.counters += [self._pages, self._pinned_pages]

    @property
    def num_pages(self) -> int:
        """Pages that locks protect."""
        self._recount()
        return self._pages.num_pages

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that locks protect."""
        self._recount()
        return len(self._protected)

    @property
    def num_pinned_pages(self) -> int:
        """Pages that locks of pins protect."""
        return self._pinned_pages.num_pages

    @property
    def num_pinned_checkpoints(self) -> int:
        """Checkpoints that locks of pins protect."""
        return len(self._pinned)

    def check(self, nodes: Iterable[Node]) -> bool:
        """Return whether what locks protect is counted as it is: for `Tree.check`.

        Args:
            nodes: all that there are.
        """
        many = list(nodes)
        return self._pages.check(many) and self._pinned_pages.check(many)

    def lock_pages(self, node: Node, num_tokens: int | None = None) -> PageLock:
        """Protect the pages from the root to the node's end.

        Args:
            num_tokens: a position inside the node's edge, at a multiple of the page size: only the pages before it are
                protected, the rest of the edge can be evicted. None: the node's end.
        """
        lock = PageLock(self, node)  # before the cut, which nothing would undo if this failed
        if len(self._changed) > MAX_CHANGED:
            self._recount()
        if num_tokens is not None and num_tokens < node.end:
            node = lock.node = self._forest.split(node, num_tokens)
        self._changed.add(node)
        node.page_locks += 1
        return lock

    def lock_state(self, node: Node) -> StateLock:
        """Protect the checkpoint of a node, and its pages with it. A tombstone's: one that is inserted meanwhile."""
        lock = StateLock(self, node)
        if len(self._changed) > MAX_CHANGED:
            self._recount()
        self._changed.add(node)
        node.page_locks += 1
        node.state_locks += 1
        return lock

    def checkpoint_came(self, node: Node) -> None:
        """Record that a tombstone on which state locks are owns a checkpoint now: they protect it."""
        self._changed.add(node)

    def pin(self, node: Node) -> StateLock:
        """Protect a checkpoint as `lock_state` does, for a pin."""
        if len(self._pinned_pages.changed) > MAX_CHANGED:
            self._pinned_pages.recount()
        lock = self.lock_state(node)
        self._pins.add(lock)
        self._pinned[node] = self._pinned.get(node, 0) + 1
        self._pinned_pages.changed.add(node)
        return lock

    def unlock(self, lock: Lock) -> None:
        """Release a lock. What it protected can be evicted, if nothing else protects it.

        Raises:
            LockError: it was released before, or belongs to another tree. Nothing was changed.
        """
        node = lock.node
        if lock.owner is not self:
            raise LockError("this lock belongs to another cache; release it there")
        if node is None:
            raise LockError("this lock was released before; a lock is released exactly once")
        self._changed.add(node)
        lock.node = None
        node.page_locks -= 1
        candidates = self._candidates
        if isinstance(lock, StateLock):
            if self._pins and lock in self._pins:
                self._unpin(lock, node)
            node.state_locks -= 1
            if node.state_locks:
                return
            candidates.enter(node)
        elif node.page_locks:
            return
        elif not node.children:  # what has children can give up its checkpoint alone, and can do so beside page locks
            candidates.enter(node)
        if not node.page_locks:
            if candidates.follows_changes and (node.slot is None or not node.children):
                candidates.changed(node)  # for a node with children a lock makes no difference
            if node.slot is None:
                self._forest.join(node)

    def _recount(self) -> None:
        """Count what the locks protect that have come and gone since the last call."""
        for node in self._changed:
            if node.state_locks and node.slot is not None:
                self._protected.add(node)
            else:
                self._protected.discard(node)
        self._pages.recount()

    def _unpin(self, lock: StateLock, node: Node) -> None:
        self._pins.remove(lock)
        count = self._pinned.pop(node) - 1
        if count:
            self._pinned[node] = count
        self._pinned_pages.changed.add(node)


def is_locked(node: Node) -> bool:
    """Return whether a page lock is on the node itself."""
    return node.page_locks > 0
