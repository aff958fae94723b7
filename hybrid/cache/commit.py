"""Handing what a request has computed to the tree."""

from __future__ import annotations

from hybrid.cache.allocator import Allocator
from hybrid.cache.lease import Lease
from hybrid.checks import count
from hybrid.errors import OwnershipError
from hybrid.key import TOKEN_BYTES, Key, check_key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint, Inserted, Kind
from hybrid.tree.tree import Tree


class Committer:
    """Moves finished pages and captured checkpoints from leases to the tree.

    After a commit the tree owns every page of the committed tokens, and the lease holds a page lock on them. Of what
    the tree had already, the lease's own copy is freed. Where an insert raises, all that was committed before it stays
    committed, and the rest stays the lease's.

    Args:
        tree: the new owner.
        memory: the pools.
        allocator: allocates places of stored checkpoints; tracks which node owns which pages.
    """

    def __init__(self, tree: Tree, memory: CacheMemory, allocator: Allocator) -> None:
        self._tree = tree
        self._memory = memory
        self._allocator = allocator

    def commit(self, lease: Lease, key: Key, num_tokens: int) -> None:
        """Insert the pages of `[0, num_tokens)`, and the checkpoints captured and lost there.

        Raises:
            OwnershipError: `num_tokens` is not a multiple of the page size, or beyond what was computed, or the key is
                not that of the lease, or an extension of it. Nothing was changed.
        """
        # Who owns the pages of [a, b): the lease shared [0, s) before, the tree had [0, e), and [0, n) is committed.
        #
        #             before           once inserted                      once shared
        #   [0, s)    tree, locked     tree, locked                       tree, locked up to n or beyond
        #   [s, e)    lease            lease; the tree has its own        freed; the tree's are mapped and locked
        #   [e, n)    lease            tree, by the new or longer node    tree, locked
        #   [n, ..)   lease            lease                              lease
        #
        # A checkpoint at n is the lease's until it is inserted, and then the tree's, or freed where the tree had one.
        check_key("commit", key)
        num_tokens, page_size = count("commit: num_tokens", num_tokens), self._tree.page_size
        if num_tokens % page_size or num_tokens > len(lease.block_table) * page_size:
            raise OwnershipError(f"commit: {num_tokens} tokens, with {len(lease.block_table)} pages of {page_size}")
        if num_tokens > lease.front_tokens:
            raise OwnershipError(f"commit: {num_tokens} tokens; the lease was advanced to {lease.front_tokens}")
        if num_tokens > len(key):
            raise OwnershipError(f"commit: {num_tokens} tokens of a key of {len(key)}")
        self._follow_key(lease, key, num_tokens)
        num_tokens = key.whole(num_tokens, page_size)  # a unit of which a part is computed stays the lease's
        captured = {checkpoint.num_tokens: checkpoint for checkpoint in lease.captured}
        for position in sorted({*captured, *lease.lost}):
            if position <= num_tokens:
                self._insert(lease, key, position, captured.get(position))
        if num_tokens > lease.num_shared * page_size:
            self._insert(lease, key, num_tokens, None)

    @staticmethod
    def _follow_key(lease: Lease, key: Key, num_tokens: int) -> None:
        """Refuse a key that does not continue what is known of the lease's."""
        if key is not lease.key:
            num_bytes = min(lease.num_known, len(key)) * TOKEN_BYTES
            if key.namespace != lease.key.namespace or key.ids[:num_bytes] != lease.key.ids[:num_bytes]:
                raise OwnershipError("commit: the key does not begin with the tokens that the lease was opened with")
            if num_tokens <= lease.num_known:
                return
        lease.key, lease.num_known = key, max(lease.num_known, num_tokens)

    def end_turn(self, lease: Lease, num_tokens: int) -> None:
        """See `HybridCache.end_turn`."""
        node = lease.shared_node
        boundary = count("end_turn: num_tokens", num_tokens) // self._tree.grid * self._tree.grid
        while node is not None and node.end > boundary:
            node = node.parent
        if node is not None and node.end == boundary:
            self._tree.relabel(node, Kind.PROMPT_END, Kind.TURN_END)

    def adopt(self, lease: Lease, key: Key, stored: Checkpoint) -> bool:
        """Insert a checkpoint as it is stored, with the pages up to it, which belong to the lease or the tree. Its
        place is the tree's afterwards; it is freed where the tree has a checkpoint there, and when this raises.

        Returns:
            Whether the tree took it.
        """
        try:
            inserted = self._enter(lease, key, stored.num_tokens, stored)
        except BaseException:
            self._allocator.free_checkpoint(stored.slot)
            raise
        if inserted.adopted:
            self._allocator.hand_over_checkpoint(stored.slot, inserted.node)
        else:
            self._allocator.free_checkpoint(stored.slot)
        self._share_pages(lease, inserted, stored.num_tokens // self._tree.page_size)
        return inserted.adopted

    def _insert(self, lease: Lease, key: Key, num_tokens: int, captured: Checkpoint | None) -> None:
        checkpoint = self._store(key, captured) if captured is not None else None
        if checkpoint is not None and checkpoint is not captured:
            self.adopt(lease, key, checkpoint)
        else:
            inserted = self._enter(lease, key, num_tokens, checkpoint)
            if checkpoint is not None and inserted.adopted:
                lease.captured.remove(checkpoint)
                captured = None
                self._allocator.hand_over_checkpoint(checkpoint.slot, inserted.node)
            self._share_pages(lease, inserted, num_tokens // self._tree.page_size)
        if captured is not None:
            lease.captured.remove(captured)
            self._allocator.free_states([captured.slot])

    def _enter(self, lease: Lease, key: Key, num_tokens: int, checkpoint: Checkpoint | None) -> Inserted:
        """Insert the lease's pages of `[0, num_tokens)`, and a checkpoint."""
        start = lease.shared_node
        pages = lease.block_table[: num_tokens // self._tree.page_size]
        past = lease.lost.get(num_tokens)
        inserted = self._tree.insert(key, num_tokens, pages, checkpoint, start, past, lease.tenant, lease.path)
        lease.lost.pop(num_tokens, None)
        if checkpoint is not None and inserted.adopted:
            lease.num_written = max(lease.num_written, num_tokens)
        return inserted

    def _share_pages(self, lease: Lease, inserted: Inserted, num_pages: int) -> None:
        """The tree owns the lease's first `num_pages` pages now, or had others for them, and the lease's are freed. Map
        the tree's, and lock them."""
        page_size, old, shared = self._tree.page_size, lease.page_lock, lease.num_shared
        num_existing = inserted.num_existing // page_size
        self._allocator.hand_over_pages(lease.block_table[num_existing:num_pages], inserted.node)
        lock = old if old is not None and old.node is inserted.node else None  # its node grew
        if num_pages >= shared and (lock is None or inserted.node.end > num_pages * page_size):
            lock = self._tree.lock_pages(inserted.node, num_pages * page_size)
        if num_existing > shared:
            duplicates = lease.block_table[shared:num_existing]
            lease.block_table[:num_existing] = self._tree.pages(inserted.node, inserted.num_existing)
            lease.num_shared = num_existing
            self._allocator.free_pages(duplicates)
        if lock is not None:
            lease.num_shared = max(num_pages, shared)
            lease.page_lock = lock
            if old is not None and old is not lock:
                self._tree.unlock(old)
        if lease.num_shared and not shared:
            self._allocator.share(lease)

    def _store(self, key: Key, captured: Checkpoint) -> Checkpoint | None:
        """Make what the tree takes of a captured state: itself, or a copy that is stored smaller. None when there is no
        memory for one, or the tree has a checkpoint there."""
        memory = self._memory
        if not memory.stores_smaller:
            return captured
        if self._tree.peek(key, captured.num_tokens).num_tokens == captured.num_tokens:
            return None
        place = self._allocator.allocate_checkpoint()
        if place is None:
            return None
        try:
            memory.contents.store(captured.slot, place)
        except BaseException:
            memory.checkpoints.free([place])
            raise
        return captured._replace(slot=place)
