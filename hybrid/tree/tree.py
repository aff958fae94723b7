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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from hybrid.errors import LockError, OwnershipError
from hybrid.key import TOKEN_BYTES, Key, common_prefix
from hybrid.tree.lookup import Lookup
from hybrid.tree.node import Checkpoint, Inserted, Lock, Node, PageLock, Released, Root, StateLock
from hybrid.tree.policy import INTERVAL, PAGES, Usage


class Tree(Lookup):
    """A radix tree over token ids, in pages, with checkpoints of state.

    Args:
        page_size: tokens per page.
        grid: checkpoints lie at multiples of this many tokens; a multiple of `page_size`.
        policy: ranks leaves and checkpoints for eviction.
        prices: what a page and a checkpoint weigh, for policies that ask.
        max_ghosts: remember at most so many evicted prefixes.
        seed: of the dice of policies that are asked about samples.

    One thread owns a tree.
    """

    def insert(
        self,
        key: Key,
        num_tokens: int,
        pages: Sequence[int],
        checkpoint: Checkpoint | None = None,
        below: Node | None = None,
        past: Usage | None = None,
    ) -> Inserted:
        """Enter the first `num_tokens` tokens of a key: pages `[0, num_tokens)`, and the checkpoint at their end.

        The tree keeps its own page where it has one, and becomes the owner of the pages of `[num_existing,
        num_tokens)`. It refuses a second checkpoint at the same place (`adopted` is False). Splits at most one node;
        the checkpoint, the children and the locks of a split node stay with its lower half.

        Args:
            pages: page ids of `[0, num_tokens)` in order.
            below: a node that the caller knows to lie on the key's way, and keeps locked: the search starts there.
            past: the use of a checkpoint that was there before, or (without `checkpoint`) was not worth its room.

        Raises:
            OwnershipError: the lengths of key, pages and checkpoint disagree. Nothing was changed.
        """
        self._refuse_mismatch(key, num_tokens, pages, checkpoint)
        ids, page_bytes = key.ids, self._page_bytes
        end = num_tokens * TOKEN_BYTES
        tick = next(self._ticks)
        usage = self._usage(tick, checkpoint.kind) if checkpoint is not None else None
        root = self._roots.get(key.namespace) or Root(key.namespace, self._usage(tick))
        node: Node = root
        offset = 0
        if below is not None and below.end <= num_tokens:
            node, offset = below, below.end * TOKEN_BYTES
        starts_with = ids.startswith
        while offset < end:
            child = node.newest
            if child is None or not starts_with(child.edge, offset):
                child = node.children.get(ids[offset : offset + page_bytes])
                if child is None:
                    break
            edge = child.edge
            if offset + len(edge) > end or not starts_with(edge, offset):
                shared = common_prefix(ids, edge, offset, 0, page_bytes, end - offset)
                node = self._split(child, shared)
                offset += shared
                break
            node = child
            offset += len(edge)
        num_existing = offset // TOKEN_BYTES
        if offset < end:
            first = offset // page_bytes
            leaf = Node(node, ids[offset:end], array("i", pages[first:]), num_tokens, self._usage(tick))
            first_child = not node.children
            node.children[ids[offset : offset + page_bytes]] = node.newest = leaf
            self._roots[key.namespace] = root
            self.num_pages += len(leaf.pages)
            if first_child:
                self._candidates.changed(node)
            node = leaf
        adopted = checkpoint is not None and node.slot is None
        if checkpoint is not None and usage is not None and adopted:
            former = past or (node.usage if node.lost_checkpoint else None)
            if former is None:
                usage.turn = checkpoint.turn
            else:  # what it was stays known
                former.created, former.used_at, usage = tick, usage.used_at, former
            usage.last_used = 0 if checkpoint.kind == INTERVAL else tick
            node.usage = usage
            node.slot = checkpoint.slot
            node.lost_checkpoint = False
            self.num_checkpoints += 1
            self._candidates.entered(node)
        elif past is not None and node.slot is None and not node.lost_checkpoint:
            node.usage, node.lost_checkpoint = past, True
            self._candidates.entered(node)
        if checkpoint is not None:
            node.usage.priority = max(node.usage.priority, checkpoint.priority)
        self._candidates.enter(node, renewed=adopted or past is not None)
        return Inserted(node, num_existing, adopted)

    def _usage(self, tick: int, kind: str = PAGES) -> Usage:
        return Usage(tick, tick, 0, kind, self._candidates.now)

    def new_usage(self, kind: str, turn: int) -> Usage:
        """The use, none yet, of a checkpoint that is to be."""
        now = self._candidates.now
        return Usage(0, 1, 0, kind, now, turn=turn)

    def admits(self, usage: Usage, num_tokens: int, above: int, only_its_own: bool, tails_help: bool) -> bool:
        """Whether a checkpoint that is to be is worth more than what would have to go for it.

        Args:
            above: where the next checkpoint above it is.
            only_its_own: nothing else needs the pages since then.
            tails_help: pages without a checkpoint may go for it instead.
        """
        self._candidates.settle(self.nodes())
        num_pages = (num_tokens - above) // self.page_size if only_its_own else 0
        return self._candidates.admits(usage, num_tokens, num_tokens - above, num_pages, tails_help)

    def relabel(self, node: Node, old: str, new: str) -> None:
        """A node's checkpoint of one kind, there or gone, is of another kind after all."""
        if (node.slot is not None or node.lost_checkpoint) and node.usage.kind == old:
            node.usage.kind = new
            self._candidates.changed(node)

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
        usage = Usage(lower.usage.created, lower.usage.last_used, 0, PAGES, lower.usage.used_at)
        upper = Node(
            upper_parent,
            lower.edge[:length],
            lower.pages[:num_pages],
            lower.end - (len(lower.edge) - length) // TOKEN_BYTES,
            usage,
        )
        edge, pages = lower.edge[length:], lower.pages[num_pages:]
        upper.children[edge[: self._page_bytes]] = upper.newest = lower
        # Everything that can fail is done; from here on the books are moved.
        upper_parent.children[upper.edge[: self._page_bytes]] = upper
        if upper_parent.newest is lower:
            upper_parent.newest = upper
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

    def num_locked_checkpoints(self, locks: Iterable[Lock]) -> int:
        """How many checkpoints these locks keep."""
        return len({id(lock.node) for lock in locks if isinstance(lock, StateLock)})

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
            self._candidates.enter(node)
        if not node.page_locks:
            self._candidates.changed(node)

    # Evicting. What has been let go of is in `released` at every moment, also when something raises on the way.

    def evict_pages(self, num_pages: int, released: Released | None = None) -> Released:
        """Give up at least `num_pages` pages if so many can go: leaves in the order of the policy, each from its tail.

        A leaf that is cut loses its checkpoint. A leaf that goes takes the childless tombstones above it along.

        Args:
            released: takes what is given up; None: a new one.
        """
        released = Released() if released is None else released
        end = len(released.pages) + num_pages
        while len(released.pages) < end:
            leaf = self._next(self._candidates.next_leaf)
            if leaf is None:
                break
            self._give_up(leaf, end - len(released.pages), released)
        return released

    def evict_checkpoints(self, num_checkpoints: int, released: Released | None = None) -> Released:
        """Give up `num_checkpoints` checkpoints if so many can go, in the order of the policy. Their pages stay."""
        released = Released() if released is None else released
        end = len(released.slots) + num_checkpoints
        while len(released.slots) < end:
            node = self._next(self._candidates.next_checkpoint)
            if node is None:
                break
            self._give_up(node, 0, released)
        return released

    def evict_one(self, num_pages: int, released: Released | None = None) -> Released:
        """Give up what goes first of all: a checkpoint, or at most `num_pages` pages from the tail of a leaf that has
        none. Nothing when nothing can go."""
        released = Released() if released is None else released
        node = self._next(self._candidates.next_of_all)
        if node is not None:
            self._give_up(node, 0 if node.slot is not None else num_pages, released)
        return released

    def evict_all(self, released: Released | None = None) -> Released:
        """Give up everything that no lock keeps."""
        released = self.evict_checkpoints(self.num_checkpoints, released)
        return self.evict_pages(self.num_pages, released)

    def overlooks(self, node: Node) -> bool:
        """Whether a node may be evicted, and never would be: for the audit."""
        return self._candidates.overlooks(node)

    @property
    def policy_failure(self) -> str | None:
        """Why the policy was dismissed; None while it holds."""
        return self._candidates.failure

    def _next(self, find: Callable[[], Node | None]) -> Node | None:
        self._candidates.settle(self.nodes())
        return find()

    def _give_up(self, node: Node, num_pages: int, released: Released) -> None:
        """Take pages from the tail of a leaf that was taken out of the candidates; none: its checkpoint."""
        try:
            if num_pages == 0:
                self._drop_checkpoint(node, released)
                self._candidates.enter(node, renewed=True)  # a leaf's pages may still go
            elif num_pages < len(node.pages):
                self._cut(node, num_pages, released)
            else:
                self._remove(node, released)
        except BaseException:
            self._candidates.enter(node)
            raise

    def _cut(self, leaf: Node, num_pages: int, released: Released) -> None:
        keep = len(leaf.pages) - num_pages
        self._drop_checkpoint(leaf, released)
        self._bury(leaf, keep * self._page_bytes)
        usage = Usage(leaf.usage.created, leaf.usage.last_used, 0, PAGES, leaf.usage.used_at)
        edge, pages = leaf.edge[: keep * self._page_bytes], leaf.pages[:keep]
        released.pages.extend(leaf.pages[keep:])
        # Everything that can fail is done; from here on the books are moved.
        leaf.usage, leaf.edge, leaf.pages = usage, edge, pages
        leaf.lost_checkpoint = False  # its place is gone too
        leaf.chain = None
        leaf.end -= num_pages * self.page_size
        self.num_pages -= num_pages
        self._candidates.enter(leaf, renewed=True)

    def _remove(self, leaf: Node, released: Released) -> None:
        node = leaf
        while True:
            parent = node.parent
            assert parent is not None and not node.children and not node.page_locks
            self._drop_checkpoint(node, released)
            self._bury(node, 0)
            released.pages.extend(node.pages)
            self.num_pages -= len(node.pages)
            del parent.children[node.edge[: self._page_bytes]]
            if parent.newest is node:
                parent.newest = next(reversed(parent.children.values()), None)
            node.parent, node.was_below = None, parent
            if parent.children:
                return
            self._candidates.changed(parent)
            if isinstance(parent, Root):
                del self._roots[parent.namespace]
                return
            if parent.slot is not None or parent.page_locks:
                self._candidates.enter(parent)
                return
            node = parent

    def _bury(self, node: Node, keep: int) -> None:
        with suppress(Exception):  # a ghost less: what was is only remembered, and evicting must go on
            self._ghosts.bury(node, keep)

    def _drop_checkpoint(self, node: Node, released: Released) -> None:
        if node.slot is not None:
            assert not node.state_locks
            self._candidates.going(node)
            released.slots.append(node.slot)
            node.slot = None
            node.lost_checkpoint = node.usage.last_used > 0  # a spare one that nobody has used is no loss
            self.num_checkpoints -= 1
