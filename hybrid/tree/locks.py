"""Locks on nodes, and how much they protect: counts that are kept as locks come and go."""

from __future__ import annotations

from hybrid.errors import LockError
from hybrid.tree.node import Lock, Node, PageLock, StateLock


class Locks:
    """The locks of a tree.

    A lock on the pages of a node protects every page above it too. `Node.holds` is the number of page locks on a node,
    plus the number of its children with a positive count: the pages of nodes with a positive count are protected. A
    lock costs a step for each node whose count becomes positive, or zero.

    Locks of pins are counted among all locks, and once more by themselves.

    Attributes:
        num_pages: pages that locks protect.
        num_checkpoints: checkpoints that locks protect.
        num_pinned_pages, num_pinned_checkpoints: those that locks of pins protect.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.num_checkpoints = 0
        self.num_pinned_pages = 0
        self._pin_holds: dict[Node, int] = {}  # as `Node.holds`, of locks of pins alone
        self._pinned: dict[Node, int] = {}  # nodes whose checkpoints are pinned, and by how many locks

    @property
    def num_pinned_checkpoints(self) -> int:
        return len(self._pinned)

    def lock_pages(self, node: Node) -> PageLock:
        """Protect the pages from the root to the node's end."""
        lock = PageLock(self, node)
        self._hold(node)
        return lock

    def lock_state(self, node: Node) -> StateLock:
        """Protect the checkpoint of a node, and its pages with it."""
        assert node.slot is not None
        lock = StateLock(self, node)
        self._hold(node)
        self.num_checkpoints += not node.state_locks
        node.state_locks += 1
        return lock

    def pin(self, node: Node) -> StateLock:
        """As `lock_state`, for a pin."""
        lock = self.lock_state(node)
        lock.is_pin = True
        self._pinned[node] = self._pinned.get(node, 0) + 1
        held: Node | None = node
        while held is not None:
            count = self._pin_holds.get(held, 0)
            self._pin_holds[held] = count + 1
            if count:
                break
            self.num_pinned_pages += len(held.pages)
            held = held.parent
        return lock

    def unlock(self, lock: Lock) -> Node:
        """Release a lock; returns the node that it was on.

        Raises:
            LockError: it was released before, or belongs to another tree. Nothing was changed.
        """
        if lock.owner is not self:
            raise LockError("this lock belongs to another cache; release it there")
        if lock.node is None:
            raise LockError("this lock was released before; a lock is released exactly once")
        node, lock.node = lock.node, None
        if isinstance(lock, StateLock):
            node.state_locks -= 1
            self.num_checkpoints -= not node.state_locks
            if lock.is_pin:
                self._unpin(node)
        node.page_locks -= 1
        held: Node | None = node
        while held is not None:
            held.holds -= 1
            if held.holds:
                break
            self.num_pages -= len(held.pages)
            held = held.parent
        return node

    def split(self, upper: Node, lower: Node) -> None:
        """A node was split: its locks stay with its lower half, and protect the upper half too."""
        if lower.holds:
            upper.holds = 1
        if lower in self._pin_holds:
            self._pin_holds[upper] = 1

    def _hold(self, node: Node) -> None:
        node.page_locks += 1
        held: Node | None = node
        while held is not None:
            held.holds += 1
            if held.holds > 1:
                break
            self.num_pages += len(held.pages)
            held = held.parent

    def _unpin(self, node: Node) -> None:
        count = self._pinned.pop(node) - 1
        if count:
            self._pinned[node] = count
        held: Node | None = node
        while held is not None:
            count = self._pin_holds.pop(held) - 1
            if count:
                self._pin_holds[held] = count
                break
            self.num_pinned_pages -= len(held.pages)
            held = held.parent
