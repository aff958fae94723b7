"""Moving units of an elastic memory together, so that a piece of it becomes free."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hybrid.cache.lease import Lease
from hybrid.memory.arena import ArenaPool
from hybrid.memory.digests import Digests
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Node


class Compactor:
    """Moves pages, and checkpoints of the tree that are not locked. States of requests stay where they are.

    It knows which node or lease owns which unit, so that no move walks the tree, or the block tables of leases that do
    not share the page: a move costs the same in a memory of any size.

    Args:
        memory: the pools, and who moves their contents.
        digests: they follow too; None: there are none.

    Attributes:
        num_moved: how many units were moved so far.
    """

    def __init__(self, memory: CacheMemory, digests: Digests | None) -> None:
        self.num_moved: int = 0
        self._memory = memory
        self._digests = digests
        # Per page, the lease that it is private to, or the node that it was inserted with: where to look for its owner.
        self._owners: list[Lease | Node | None] = [None] * memory.pages.size
        self._places = array("i", bytes(4 * memory.pages.size))  # per page, how many are before it on its path
        self._sharers: dict[int, dict[Lease, None]] = {}  # leases that share pages of the tree, by their first page
        self._checkpoints: dict[int, Node] = {}

    def note_private(self, lease: Lease, pages: Sequence[int]) -> None:
        """These pages are about to follow those of a lease."""
        for place, page in enumerate(pages, len(lease.block_table)):
            self._owners[page] = lease
            self._places[page] = place

    def note_place(self, page: int, place: int) -> None:
        """A private page is at another place in the block table of its lease."""
        self._places[page] = place

    def note_pages(self, pages: Iterable[int], node: Node) -> None:
        """A node was inserted with these pages, which were private to a lease."""
        for page in pages:
            self._owners[page] = node

    def forget_pages(self, pages: Iterable[int]) -> None:
        """These pages are free."""
        for page in pages:
            self._owners[page] = None

    def note_sharer(self, lease: Lease) -> None:
        """A lease shares pages of the tree from now on."""
        self._sharers.setdefault(lease.block_table[0], {})[lease] = None

    def forget_sharer(self, lease: Lease) -> None:
        """A lease that may share pages of the tree is about to be closed."""
        first = lease.block_table[0]
        sharers = self._sharers.get(first, {})
        sharers.pop(lease, None)
        if not sharers:
            self._sharers.pop(first, None)

    def note_checkpoint(self, slot: int, node: Node) -> None:
        """A node owns the checkpoint in this slot."""
        self._checkpoints[slot] = node

    def forget_checkpoints(self, slots: Iterable[int]) -> None:
        """These checkpoints were evicted."""
        for slot in slots:
            self._checkpoints.pop(slot, None)

    def compact(self, pool: ArenaPool) -> bool:
        """Move units of a pool together so that a piece of it becomes free. False when that cannot be done."""
        memory = self._memory
        if pool.num_loose < pool.per_piece:
            return False
        if pool is memory.pages:
            moves = pool.plan_moves(lambda page: True)
        elif pool is memory.checkpoints:
            moves = pool.plan_moves(self._may_move)
        else:
            return False
        if not moves:
            return False
        self._move_contents(pool, moves)
        # The contents are copied; what follows cannot fail.
        if pool is memory.pages:
            self._repoint_pages(moves)
            if self._digests is not None:
                self._digests.move_pages(moves)
        else:
            if self._digests is not None:
                self._digests.move_checkpoints(moves)
            for old, new in moves.items():
                node = self._checkpoints[new] = self._checkpoints.pop(old)
                node.slot = new
        pool.move(moves)
        self.num_moved += len(moves)
        return True

    def _may_move(self, slot: int) -> bool:
        node = self._checkpoints.get(slot)
        return node is not None and not node.page_locks

    def _move_contents(self, pool: ArenaPool, moves: dict[int, int]) -> None:
        memory = self._memory
        if memory.stores_smaller and pool is memory.checkpoints:
            assert memory.store is not None
            memory.store.move_stored(moves)
        elif memory.mover is not None and pool is memory.pages:
            memory.mover.move_pages(moves)
        elif memory.mover is not None:
            memory.mover.move_states(moves)

    def _repoint_pages(self, moves: dict[int, int]) -> None:
        """Replace the ids of moved pages, in the tree and in block tables.

        The node that a page was inserted with may have been split, joined or removed since; its run knows the page.
        """
        for old, new in moves.items():
            owner, place = self._owners[old], self._places[old]
            self._owners[old], self._owners[new], self._places[new] = None, owner, place
            if isinstance(owner, Lease):
                owner.block_table[place] = new
            elif owner is not None:
                sharers = self._sharers.get(owner.run.first_page, {})
                owner.run.move_page(place, new)
                for lease in sharers:
                    if place < lease.num_shared and lease.block_table[place] == old:
                        lease.block_table[place] = new
                if place == 0 and sharers:
                    self._sharers[new] = self._sharers.pop(old)
