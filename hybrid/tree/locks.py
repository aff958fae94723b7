"""Locks on nodes, and how much they protect: counts that are kept up to date as locks come and go; and handles, which
are integers that stand for nodes, for callers that can keep no objects of the tree."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from hybrid.errors import LockError
from hybrid.tree.candidates import Candidates
from hybrid.tree.forest import MAX_CHANGED, Forest, LockedPathCounter
from hybrid.tree.node import Lock, Node, PageLock, Root, StateLock


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
        self._settle()
        return self._pages.num_pages

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that locks protect."""
        self._settle()
        return len(self._protected)

    @property
    def num_pinned_pages(self) -> int:
        """Pages that locks of pins protect."""
        return self._pinned_pages.num_pages

    @property
    def num_pinned_checkpoints(self) -> int:
        """Checkpoints that locks of pins protect."""
        return len(self._pinned)

    def is_right(self, nodes: Iterable[Node]) -> bool:
        """Return whether what locks protect is counted as it is: for `Tree.check`.

        Args:
            nodes: all that there are.
        """
        many = list(nodes)
        return self._pages.is_right(many) and self._pinned_pages.is_right(many)

    def lock_pages(self, node: Node, num_tokens: int | None = None) -> PageLock:
        """Protect the pages from the root to the node's end.

        Args:
            num_tokens: a position inside the node's edge, at a multiple of the page size: only the pages before it are
                protected, the rest of the edge can be evicted. None: the node's end.
        """
        lock = PageLock(self, node)  # before the cut, which nothing would undo if this failed
        if len(self._changed) > MAX_CHANGED:
            self._settle()
        if num_tokens is not None and num_tokens < node.end:
            node = lock.node = self._forest.split(node, num_tokens)
        self._changed.add(node)
        node.page_locks += 1
        return lock

    def lock_state(self, node: Node) -> StateLock:
        """Protect the checkpoint of a node, and its pages with it. A tombstone's: one that is inserted meanwhile."""
        lock = StateLock(self, node)
        if len(self._changed) > MAX_CHANGED:
            self._settle()
        self._changed.add(node)
        node.page_locks += 1
        node.state_locks += 1
        return lock

    def checkpoint_came(self, node: Node) -> None:
        """A tombstone on which state locks are owns a checkpoint now: they protect it."""
        self._changed.add(node)

    def pin(self, node: Node) -> StateLock:
        """Protect a checkpoint as `lock_state` does, for a pin."""
        if len(self._pinned_pages.changed) > MAX_CHANGED:
            self._pinned_pages.settle()
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

    def _settle(self) -> None:
        """Count what the locks protect that have come and gone since the last call."""
        for node in self._changed:
            if node.state_locks and node.slot is not None:
                self._protected.add(node)
            else:
                self._protected.discard(node)
        self._pages.settle()

    def _unpin(self, lock: StateLock, node: Node) -> None:
        self._pins.remove(lock)
        count = self._pinned.pop(node) - 1
        if count:
            self._pinned[node] = count
        self._pinned_pages.changed.add(node)


def is_locked(node: Node) -> bool:
    """Return whether a page lock is on the node itself."""
    return node.page_locks > 0


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
