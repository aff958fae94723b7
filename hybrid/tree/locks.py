"""Locks on nodes, and how much they protect: counts that are kept up to date as locks come and go."""

from __future__ import annotations

from hybrid.errors import LockError
from hybrid.tree.cover import Cover
from hybrid.tree.node import Lock, Node, PageLock, PinLock, StateLock


class Locks:
    """The locks of a tree.

    A lock on the pages of a node protects every page above it too. Locks of pins are counted among all locks, and once
    more by themselves.

    Attributes:
        num_checkpoints: checkpoints that locks protect.
        covers: the unions of paths that are counted; the tree reports to them how its nodes change.
    """

    def __init__(self) -> None:
        self.num_checkpoints: int = 0
        self._pinned: dict[Node, int] = {}  # nodes whose checkpoints are pinned, and by how many locks
        self._pages = Cover()
        self._pinned_pages = Cover()
        self.covers: tuple[Cover, Cover] = (self._pages, self._pinned_pages)

    @property
    def num_pages(self) -> int:
        """Pages that locks protect."""
        return self._pages.num_pages

    @property
    def num_pinned_pages(self) -> int:
        """Pages that locks of pins protect."""
        return self._pinned_pages.num_pages

    @property
    def num_pinned_checkpoints(self) -> int:
        """Checkpoints that locks of pins protect."""
        return len(self._pinned)

    def lock_pages(self, node: Node) -> PageLock:
        """Protect the pages from the root to the node's end."""
        lock = PageLock(self, node)
        if not node.page_locks:
            self._pages.toggle(node)
        node.page_locks += 1
        return lock

    def lock_state(self, node: Node) -> StateLock:
        """Protect the checkpoint of a node, and its pages with it."""
        assert node.slot is not None
        lock = StateLock(self, node)
        if not node.page_locks:
            self._pages.toggle(node)
        node.page_locks += 1
        if not node.state_locks:
            self.num_checkpoints += 1
        node.state_locks += 1
        return lock

    def pin(self, node: Node) -> StateLock:
        """As `lock_state`, for a pin."""
        assert node.slot is not None
        lock = PinLock(self, node)
        if not node.page_locks:
            self._pages.toggle(node)
        if node not in self._pinned:
            self._pinned_pages.toggle(node)
        self._pinned[node] = self._pinned.get(node, 0) + 1
        node.page_locks += 1
        if not node.state_locks:
            self.num_checkpoints += 1
        node.state_locks += 1
        return lock

    def unlock(self, lock: Lock) -> Node:
        """Release a lock; returns the node that it was on.

        Raises:
            LockError: it was released before, or belongs to another tree. Nothing was changed.
        """
        node = lock.node
        if lock.owner is not self:
            raise LockError("this lock belongs to another cache; release it there")
        if node is None:
            raise LockError("this lock was released before; a lock is released exactly once")
        if node.page_locks == 1:
            self._pages.toggle(node)
        lock.node = None
        node.page_locks -= 1
        if isinstance(lock, StateLock):
            node.state_locks -= 1
            if not node.state_locks:
                self.num_checkpoints -= 1
            if isinstance(lock, PinLock):
                self._unpin(node)
        return node

    def _unpin(self, node: Node) -> None:
        count = self._pinned.pop(node) - 1
        if count:
            self._pinned[node] = count
        else:
            self._pinned_pages.toggle(node)
