"""The radix tree: which pages hold which tokens, and where a state was kept.

One tree tracks two resources that live and die separately. A node owns the pages of its edge, and may own a
*checkpoint*: the slot of the state after exactly the tokens from the root to the node's end. A node without one is a
*tombstone*.

What holds at every moment (`hybrid.audit` states it in code):

* Edges are whole pages; `0 < len(edge)`; a child is found by the bytes of the first page of its edge.
* Only a leaf gives up pages. A lock on a node's pages therefore protects every page above it too, and costs nothing but
  one count.
* A checkpoint may go from any node. `page_locks >= state_locks`.
* A tombstone that loses its last child goes with it, unless it is locked (the cascade).

The tree knows integers only: tokens, page ids, slots, counts. It allocates and frees nothing: it returns what it lets
go of. `match` changes nothing but recency, `peek` changes nothing at all, only `insert` splits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from hybrid.errors import LockError, OwnershipError
from hybrid.eviction import EvictionQueue, Policy, Usage
from hybrid.key import TOKEN_BYTES, Key, common_prefix
from hybrid.node import Checkpoint, Inserted, Lock, Match, Node, PageLock, Released, Root, StateLock


class Tree:
    """A radix tree over token ids, in pages, with checkpoints of state.

    Args:
        page_size: tokens per page.
        grid: checkpoints lie at multiples of this many tokens; a multiple of `page_size`.
        policy: ranks leaves and checkpoints for eviction.

    One thread owns a tree.
    """

    def __init__(self, page_size: int, grid: int, policy: Policy) -> None:
        assert grid % page_size == 0
        self.page_size = page_size
        self.grid = grid
        self.num_pages = 0
        self.num_checkpoints = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = policy
        self._roots: dict[str, Root] = {}
        self._ticks = count(1)
        self._leaves: EvictionQueue[Node] = EvictionQueue(self._rank, self._is_evictable_leaf)
        self._checkpoints: EvictionQueue[Node] = EvictionQueue(self._rank, self._is_evictable_checkpoint)

    # Reading

    def match(self, key: Key, limit: int) -> Match:
        """The longest known prefix of the first `limit` tokens. Counts as a use of the checkpoint found, and of nothing
        else."""
        found = self.peek(key, limit)
        self.touch(found)
        return found

    def touch(self, match: Match) -> None:
        """Count a use of the checkpoint that was found."""
        node = match.checkpoint
        if node is not None:
            node.usage.last_used = next(self._ticks)
            node.usage.hits += 1

    def peek(self, key: Key, limit: int) -> Match:
        """As `match`, and counts as nothing."""
        node: Node | None = self._roots.get(key.namespace)
        if node is None:
            return Match(0, 0, None, None, None)
        ids, page_bytes = key.ids, self._page_bytes
        end = min(limit * TOKEN_BYTES, len(ids)) // page_bytes * page_bytes
        starts_with = ids.startswith
        offset = 0
        checkpoint: Node | None = None
        while offset < end:
            child = node.children.get(ids[offset : offset + page_bytes])
            if child is None:
                break
            node, edge = child, child.edge
            stop = offset + len(edge)
            if stop > end or not starts_with(edge, offset):
                offset += common_prefix(ids, edge, offset, 0, page_bytes, end - offset)
                break
            offset = stop
            if node.slot is not None:
                checkpoint = node
        num_page_tokens = offset // TOKEN_BYTES
        num_tokens = checkpoint.end if checkpoint is not None else 0
        branching_len = num_page_tokens // self.grid * self.grid
        return Match(
            num_tokens,
            num_page_tokens,
            branching_len if branching_len > num_tokens else None,
            checkpoint,
            node if offset else None,
        )

    def pages(self, node: Node | None, num_tokens: int) -> array[int]:
        """Page ids of the first `num_tokens` tokens on the way from the root to `node`."""
        parts = []
        while node is not None and node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        pages = array("i")
        for part in reversed(parts):
            pages.extend(part)
        del pages[num_tokens // self.page_size :]
        return pages

    def was_evicted(self, key: Key, match: Match) -> bool:
        """Whether the token after the page hit was once here. Right after the match; forgets what lay below evicted
        nodes."""
        node = match.deepest or self._roots.get(key.namespace)
        if node is None or node.end != match.num_page_tokens:
            return False  # nothing is lost from inside an edge: what went on from there is there
        start = match.num_page_tokens * TOKEN_BYTES
        return hash(key.ids[start : start + self._page_bytes]) in node.lost_children

    def lost_checkpoint(self, match: Match) -> bool:
        """Whether a checkpoint between the usable hit and the page hit was evicted."""
        node = match.deepest
        while node is not None and node is not match.checkpoint:
            if node.lost_checkpoint and node.end <= match.num_page_tokens:
                return True
            node = node.parent
        return False

    def knows(self, namespace: str) -> bool:
        """Whether anything is kept in the namespace."""
        return namespace in self._roots

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Every node but the roots, parents first, with its namespace."""
        for namespace, root in self._roots.items():
            stack = list(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(reversed(node.children.values()))

    # Writing

    def insert(self, key: Key, num_tokens: int, pages: Sequence[int], checkpoint: Checkpoint | None = None) -> Inserted:
        """Enter the first `num_tokens` tokens of a key: pages `[0, num_tokens)`, and the checkpoint at their end.

        The tree keeps its own page where it has one, and becomes the owner of the pages of `[num_existing,
        num_tokens)`. It refuses a second checkpoint at the same place (`adopted` is False). Splits at most one node;
        the checkpoint, the children and the locks of a split node stay with its lower half.

        Args:
            pages: page ids of `[0, num_tokens)` in order.

        Raises:
            OwnershipError: the lengths of key, pages and checkpoint disagree. Nothing was changed.
        """
        self._refuse_mismatch(key, num_tokens, pages, checkpoint)
        ids, page_bytes = key.ids, self._page_bytes
        end = num_tokens * TOKEN_BYTES
        tick = next(self._ticks)
        root = self._roots.get(key.namespace) or Root(key.namespace, Usage(tick, tick))
        node: Node = root
        offset = 0
        while offset < end:
            child = node.children.get(ids[offset : offset + page_bytes])
            if child is None:
                break
            edge = child.edge
            if offset + len(edge) > end or not ids.startswith(edge, offset):
                shared = common_prefix(ids, edge, offset, 0, page_bytes, end - offset)
                node = self._split(child, shared)
                offset += shared
                break
            node = child
            offset += len(edge)
        num_existing = offset // TOKEN_BYTES
        if offset < end:
            first = offset // page_bytes
            leaf = Node(node, ids[offset:end], array("i", pages[first:]), num_tokens, Usage(tick, tick))
            node.children[ids[offset : offset + page_bytes]] = leaf
            self._roots[key.namespace] = root
            self.num_pages += len(leaf.pages)
            node = leaf
        adopted = False
        if checkpoint is not None and node.slot is None:
            node.slot = checkpoint.slot
            node.lost_checkpoint = False
            if not checkpoint.spare:
                node.usage.last_used = tick
            elif node.usage.created == tick:
                node.usage.last_used = 0
            self.num_checkpoints += 1
            adopted = True
        self._enter(node)
        return Inserted(node, num_existing, adopted)

    def _refuse_mismatch(self, key: Key, num_tokens: int, pages: Sequence[int], checkpoint: Checkpoint | None) -> None:
        if (
            num_tokens <= 0
            or num_tokens > len(key)
            or num_tokens % self.page_size
            or len(pages) * self.page_size != num_tokens
        ):
            raise OwnershipError(
                f"insert: {num_tokens} tokens of a key of {len(key)} and {len(pages)} pages of "
                f"{self.page_size} do not belong together"
            )
        if checkpoint is not None and (checkpoint.num_tokens != num_tokens or num_tokens % self.grid):
            raise OwnershipError(
                f"insert: a state captured after {checkpoint.num_tokens} tokens is offered for {num_tokens} "
                f"(grid {self.grid})"
            )

    def _split(self, lower: Node, length: int) -> Node:
        """Cut an edge after `length` bytes; returns the upper half, which is a tombstone."""
        upper_parent, num_pages = lower.parent, length // self._page_bytes
        assert upper_parent is not None and 0 < length < len(lower.edge)
        usage = Usage(lower.usage.created, lower.usage.last_used)
        upper = Node(
            upper_parent,
            lower.edge[:length],
            lower.pages[:num_pages],
            lower.end - (len(lower.edge) - length) // TOKEN_BYTES,
            usage,
        )
        edge, pages = lower.edge[length:], lower.pages[num_pages:]
        upper.children[edge[: self._page_bytes]] = lower
        # Everything that can fail is done; from here on the books are moved.
        upper_parent.children[upper.edge[: self._page_bytes]] = upper
        lower.parent, lower.edge, lower.pages = upper, edge, pages
        return upper

    # Locks

    def lock_pages(self, node: Node) -> PageLock:
        """Keep the pages from the root to the node's end."""
        lock = PageLock(self, node)
        node.page_locks += 1
        return lock

    def lock_state(self, node: Node) -> StateLock:
        """Keep the checkpoint of a node, and with it its pages."""
        assert node.slot is not None
        lock = StateLock(self, node)
        node.state_locks += 1
        node.page_locks += 1
        return lock

    def num_locked_pages(self, locks: Iterable[Lock]) -> int:
        """How many pages these locks keep."""
        seen: set[int] = set()
        total = 0
        for lock in locks:
            node = lock.node
            while node is not None and id(node) not in seen:
                seen.add(id(node))
                total += len(node.pages)
                node = node.parent
        return total

    def unlock(self, lock: Lock) -> None:
        """Release a lock.

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
        node.page_locks -= 1
        if not node.page_locks or not node.state_locks:
            self._enter(node)

    # Evicting

    def evict_pages(self, num_pages: int) -> Released:
        """Give up at least `num_pages` pages if so many can go: leaves in the order of the policy, each from its tail.

        A leaf that is cut loses its checkpoint. A leaf that goes takes the childless tombstones above it along.
        """
        released = Released()
        while len(released.pages) < num_pages:
            leaf = self._leaves.pop()
            if leaf is None:
                break
            missing = num_pages - len(released.pages)
            if missing < len(leaf.pages):
                self._cut(leaf, missing, released)
            else:
                self._remove(leaf, released)
        return released

    def evict_checkpoints(self, num_checkpoints: int) -> Released:
        """Give up `num_checkpoints` checkpoints if so many can go, in the order of the policy. Their pages stay."""
        released = Released()
        while len(released.slots) < num_checkpoints:
            node = self._checkpoints.pop()
            if node is None:
                break
            self._drop_checkpoint(node, released)
        return released

    def evict_all(self) -> Released:
        """Give up everything that no lock keeps."""
        released = self.evict_checkpoints(self.num_checkpoints)
        everything = self.evict_pages(self.num_pages)
        return Released(everything.pages, released.slots + everything.slots)

    def _cut(self, leaf: Node, num_pages: int, released: Released) -> None:
        keep = len(leaf.pages) - num_pages
        self._drop_checkpoint(leaf, released)
        leaf.lost_checkpoint = False  # its place is gone too
        leaf.lost_children.clear()  # and that of what went on from there
        leaf.remember_lost(leaf.edge[keep * self._page_bytes : (keep + 1) * self._page_bytes])
        released.pages.extend(leaf.pages[keep:])
        del leaf.pages[keep:]
        leaf.edge = leaf.edge[: keep * self._page_bytes]
        leaf.end -= num_pages * self.page_size
        self.num_pages -= num_pages
        self._enter(leaf)

    def _remove(self, leaf: Node, released: Released) -> None:
        node = leaf
        while True:
            parent = node.parent
            assert parent is not None and not node.children and not node.page_locks
            self._drop_checkpoint(node, released)
            released.pages.extend(node.pages)
            self.num_pages -= len(node.pages)
            first = node.edge[: self._page_bytes]
            del parent.children[first]
            parent.remember_lost(first)
            node.parent = None
            if parent.children:
                return
            if isinstance(parent, Root):
                del self._roots[parent.namespace]
                return
            if parent.slot is not None or parent.page_locks:
                self._enter(parent)
                return
            node = parent

    def _drop_checkpoint(self, node: Node, released: Released) -> None:
        if node.slot is not None:
            assert not node.state_locks
            released.slots.append(node.slot)
            node.slot = None
            node.lost_checkpoint = True
            self.num_checkpoints -= 1

    def _enter(self, node: Node) -> None:
        """Make a node a candidate for what it may be evicted for."""
        if self._is_evictable_leaf(node):
            self._leaves.push(node)
        if self._is_evictable_checkpoint(node):
            self._checkpoints.push(node)

    def _rank(self, node: Node) -> float:
        return self._policy.rank(node.usage)

    @staticmethod
    def _is_evictable_leaf(node: Node) -> bool:
        return node.parent is not None and not node.children and not node.page_locks

    @staticmethod
    def _is_evictable_checkpoint(node: Node) -> bool:
        return node.parent is not None and node.slot is not None and not node.state_locks
