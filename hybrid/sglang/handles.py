"""Handles: integers that stand for the nodes of a tree, with locks that are counted by them, for SGLang, which keeps no
objects of a tree."""

from __future__ import annotations

from itertools import count

from hybrid.errors import LockError
from hybrid.tree.locks import Locks
from hybrid.tree.node import Node, PageLock, Root, StateLock


class HandleLocks:
    """The locks that were taken by one handle.

    A lock on a checkpoint protects the pages too: locks of pages alone are taken for as many more as are asked for.

    Attributes:
        num_pages, num_states: how often its pages, and its checkpoint, were asked to be locked, and not released.
        pages, states: the tree's locks for that; none for the empty prefix.
    """

    __slots__ = ("num_pages", "num_states", "pages", "states")

    def __init__(self) -> None:
        self.num_pages: int = 0
        self.num_states: int = 0
        self.pages: list[PageLock] = []
        self.states: list[StateLock] = []


NOTHING = HandleLocks()
"""The locks of a handle that has none; never changed."""


class Handles:
    """Integers that stand for the nodes of a tree, and locks that are counted by them.

    A handle stands for a node until that is removed, and is never given out again.

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
        self._held: dict[int, HandleLocks] = {}
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
        held = self._held.get(handle) or HandleLocks()
        if state and node is not None:
            held.states.append(self._locks.lock_state(node))
        held.num_pages += pages
        held.num_states += state
        if node is not None and held.num_pages - held.num_states > len(held.pages):
            held.pages.append(self._locks.lock_pages(node))
        self._held[handle] = held

    def unlock(self, handle: int, *, pages: bool = True, state: bool = True) -> None:
        """Release one lock of each kind that is named.

        Raises:
            LockError: the node has no such lock. Nothing was changed.
        """
        held = self._held.get(handle, NOTHING)
        if (state and not held.num_states) or (pages and not held.num_pages):
            what = "checkpoint" if state and not held.num_states else "pages"
            raise LockError(f"handle {handle} has no lock on its {what}; a lock is released exactly once")
        held.num_pages -= pages
        held.num_states -= state
        if not held.num_pages and not held.num_states:
            del self._held[handle]
        only_pages = held.num_pages - held.num_states
        if only_pages < len(held.pages):
            self._locks.unlock(held.pages.pop())
        if state and held.states:
            lock = held.states.pop()
            if only_pages > len(held.pages) and lock.node is not None:
                held.pages.append(self._locks.lock_pages(lock.node))  # the pages stay locked
            self._locks.unlock(lock)

    def num_locks(self, handle: int) -> tuple[int, int]:
        """Number of locks on the pages, and on the checkpoint, that were taken by this handle."""
        held = self._held.get(handle, NOTHING)
        return held.num_pages, held.num_states

    @property
    def num_known(self) -> int:
        """Number of nodes that have a handle, some that were removed included."""
        return len(self._nodes)

    def _sweep(self) -> None:
        """Forget nodes that were removed."""
        self._nodes = {handle: node for handle, node in self._nodes.items() if node.parent is not None}
        self._handles = {node: handle for handle, node in self._nodes.items()}
        self._sweep_at = max(1024, 2 * len(self._nodes))
