"""Integers that stand for nodes, and locks that are counted by them: for callers that can keep no objects of the tree.

A handle is never given out again. It stands for a node until the node is removed.
"""

from __future__ import annotations

from itertools import count

from hybrid.errors import LockError
from hybrid.tree.locks import Locks
from hybrid.tree.node import Lock, Node, Root


class Handles:
    """The handles of a tree's nodes.

    The empty prefix has a handle too; locks on it protect nothing, and are counted all the same.

    Args:
        locks: of the tree.
        numbers: where handles are taken from; handles of several trees that share it differ.

    Attributes:
        root: the handle of the empty prefix, in all namespaces.
    """

    def __init__(self, locks: Locks, numbers: count[int] | None = None) -> None:
        numbers = numbers if numbers is not None else count(1)
        self.root: int = next(numbers)
        self._locks = locks
        self._numbers = numbers
        self._handles: dict[Node, int] = {}
        self._nodes: dict[int, Node] = {}
        self._held: dict[tuple[int, bool], list[Lock | None]] = {}
        self._sweep_at = 1024

    def of(self, node: Node | None) -> int:
        """The handle of a node; None is the empty prefix."""
        if node is None or isinstance(node, Root):
            return self.root
        handle = self._handles.get(node)
        if handle is None:
            handle = self._handles[node] = next(self._numbers)
            self._nodes[handle] = node
            if len(self._nodes) > self._sweep_at:
                self._sweep()
        return handle

    def node(self, handle: int) -> Node | None:
        """The node of a handle; None for the empty prefix.

        Raises:
            LockError: there is no such handle, or its node was removed.
        """
        if handle == self.root:
            return None
        node = self._nodes.get(handle)
        if node is None or node.parent is None:
            raise LockError(
                f"handle {handle} stands for no node: it was evicted, or belongs to another tree; match again"
            )
        return node

    def lock(self, handle: int, *, pages: bool = True, state: bool = True) -> None:
        """Protect the pages up to a node's end, its checkpoint, or both; one more time if they are already.

        The checkpoint may be missing, or be evicted before the lock is taken: then what is protected is the place, and
        a checkpoint that is inserted there meanwhile.

        Raises:
            LockError: the handle stands for no node. Nothing was changed.
        """
        node = self.node(handle)
        if pages:
            lock = self._locks.lock_pages(node) if node is not None else None
            self._held.setdefault((handle, False), []).append(lock)
        if state:
            state_lock = self._locks.lock_state(node) if node is not None else None
            self._held.setdefault((handle, True), []).append(state_lock)

    def unlock(self, handle: int, *, pages: bool = True, state: bool = True) -> None:
        """Release one lock of each kind that is named.

        Raises:
            LockError: the node has no such lock. Nothing was changed.
        """
        held = self._held
        for kind, named in ((True, state), (False, pages)):
            if named and (handle, kind) not in held:
                what = "checkpoint" if kind else "pages"
                raise LockError(f"handle {handle} has no lock on its {what}; a lock is released exactly once")
        for kind, named in ((True, state), (False, pages)):
            if named:
                locks = held[handle, kind]
                lock = locks.pop()
                if not locks:
                    del held[handle, kind]
                if lock is not None:
                    self._locks.unlock(lock)

    def num_locks(self, handle: int) -> tuple[int, int]:
        """Number of locks on the pages, and on the checkpoint, that were taken by this handle."""
        return len(self._held.get((handle, False), ())), len(self._held.get((handle, True), ()))

    @property
    def num_known(self) -> int:
        """Number of nodes that have a handle, some that were removed included."""
        return len(self._nodes)

    def _sweep(self) -> None:
        """Forget nodes that were removed."""
        self._nodes = {handle: node for handle, node in self._nodes.items() if node.parent is not None}
        self._handles = {node: handle for handle, node in self._nodes.items()}
        self._sweep_at = max(1024, 2 * len(self._nodes))
