"""Allocating pages and state slots: from the pools, and from what the tree evicts when they run out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pins
from hybrid.memory.arena import Arena, ArenaPool
from hybrid.memory.memory import CacheMemory, Pool
from hybrid.tree.node import Lock, Node, Released, StateLock
from hybrid.tree.tree import Tree


class Allocator:
    """Allocates units of a memory, and has the tree evict for them.

    An allocation that cannot succeed, whatever is evicted, returns None and evicts nothing. In an elastic memory units
    that are in the way are moved together before anything is evicted.

    Args:
        tree: evicts.
        memory: the pools, and who moves their contents.
        leases, pins: who holds pages, slots and locks. The block tables of leases follow pages that are moved.
        on_evict: called with what the tree has evicted, before it is freed.

    Attributes:
        evicted_pages, evicted_checkpoints: how many were evicted so far.
        num_moved: how many units were moved together so far.
    """

    def __init__(
        self,
        tree: Tree,
        memory: CacheMemory,
        leases: Collection[Lease],
        pins: Pins,
        on_evict: Callable[[Released], None] | None = None,
    ) -> None:
        self.evicted_pages: int = 0
        self.evicted_checkpoints: int = 0
        self.num_moved: int = 0
        self._tree = tree
        self._memory = memory
        self._pages = memory.pages
        self._states = memory.states
        self._checkpoints = memory.checkpoints
        self._arena = memory.arena
        self._leases = leases
        self._pins = pins
        self._on_evict = on_evict
        # Per page, the node that it was inserted with: where to look for its owner when it is moved.
        self._inserted_with: list[Node | None] = [None] * memory.pages.size if memory.arena is not None else []

    def allocate_pages(self, count: int) -> list[int] | None:
        """Allocate `count` pages."""
        if count > self._pages.num_free:
            if count > self._max_pages():
                return None
            if self._arena is not None:
                self._free_units(self._arena, self._pages, count)
            else:
                self.evict(self._tree.evict_pages, count - self._pages.num_free)
        return self._pages.allocate(count)

    def allocate_state(self) -> int | None:
        """Allocate a state slot of a request."""
        return self._allocate_slot(self._states)

    def allocate_checkpoint(self) -> int | None:
        """Allocate the place of a checkpoint of the tree."""
        return self._allocate_slot(self._checkpoints)

    def evict(self, evict: Callable[..., Released], *amount: int) -> Released:
        """Have the tree evict, and free what it gave up, also when it raised on the way.

        Args:
            evict: a method of the tree that takes `amount` and `released`.
        """
        released = Released()
        try:
            evict(*amount, released=released)
        finally:
            self._free(released)
        return released

    def note_owner(self, pages: Sequence[int], node: Node) -> None:
        """Note that a node was inserted with these pages, to find them when they are to be moved."""
        if self._arena is not None:
            for page in pages:
                self._inserted_with[page] = node

    def num_private(self) -> tuple[int, int]:
        """Number of pages, and of state slots, that belong to requests: from counts alone, for any thread."""
        if self._arena is None:
            pages = self._pages.capacity - self._pages.num_free - self._tree.num_pages
            states = self._states.capacity - self._states.num_free - self._tree.num_checkpoints
        else:
            assert isinstance(self._pages, ArenaPool) and isinstance(self._states, ArenaPool)
            pages = self._pages.num_used - self._tree.num_pages
            states = self._states.num_used
            if not self._memory.stores_smaller:
                states -= self._tree.num_checkpoints
        return max(0, pages), max(0, states)

    def _free(self, released: Released) -> None:
        if self._on_evict is not None:
            self._on_evict(released)
        self._pages.free(released.pages)
        self._checkpoints.free(released.slots)
        self.evicted_pages += len(released.pages)
        self.evicted_checkpoints += len(released.slots)

    def _allocate_slot(self, pool: Pool) -> int | None:
        if not pool.num_free:
            if self._arena is not None:
                if self._can_have_slot(self._arena, pool):
                    self._free_units(self._arena, pool, 1)
            else:
                self.evict(self._tree.evict_checkpoints, 1)
        slots = pool.allocate(1)
        return slots[0] if slots else None

    # What evicting could yield

    def _locks(self) -> Iterator[Lock]:
        for lease in self._leases:
            yield from lease.locks
        yield from self._pins.locks()

    def _max_pages(self) -> int:
        """Pages that could be had by evicting everything that is not locked."""
        if self._arena is None:
            return self._pages.num_free + self._tree.num_pages - self._tree.num_locked_pages(self._locks())
        assert isinstance(self._pages, ArenaPool)
        held = sum(len(pieces) for pieces in self._held_slots().values())
        return (self._arena.num_pieces - held) * self._pages.per_piece - self._num_held_pages()

    def _num_held_pages(self) -> int:
        """Pages that requests own, and those that locks protect."""
        private = sum(len(lease.block_table) - lease.num_shared for lease in self._leases)
        return private + self._tree.num_locked_pages(self._locks())

    def _held_slots(self) -> dict[int, dict[int, int]]:
        """Per kind of state, by id of its pool: the pieces that it keeps whatever is evicted, and how many of their
        slots are held: those of requests, which are never moved, and those of locked checkpoints."""
        assert isinstance(self._states, ArenaPool) and isinstance(self._checkpoints, ArenaPool)
        pieces: dict[int, dict[int, int]] = {id(self._states): {}, id(self._checkpoints): {}}
        held = [(self._states, slot) for slot in range(self._states.reserved)]
        held += [(self._states, slot) for lease in self._leases for slot in lease.private_slots()]
        locked = {lock.node.slot for lock in self._locks() if isinstance(lock, StateLock) and lock.node is not None}
        held += [(self._checkpoints, slot) for slot in locked if slot is not None]
        for pool, slot in held:
            of_pool = pieces[id(pool)]
            of_pool[slot // pool.per_piece] = of_pool.get(slot // pool.per_piece, 0) + 1
        return pieces

    def _can_have_slot(self, arena: Arena, pool: Pool) -> bool:
        """Whether evicting everything that is not locked would yield a slot: in a piece with one that is held, or in a
        piece of its own."""
        assert isinstance(pool, ArenaPool) and isinstance(self._pages, ArenaPool)
        held = self._held_slots()
        if any(used < pool.per_piece for used in held[id(pool)].values()):
            return True
        return sum(map(len, held.values())) + -(-self._num_held_pages() // self._pages.per_piece) < arena.num_pieces

    # One budget of pieces

    def _free_units(self, arena: Arena, pool: Pool, count: int) -> None:
        """Have `count` units of a pool free, if that is possible: units that are in the way are moved together first,
        then what is worth least is evicted."""
        assert isinstance(pool, ArenaPool) and isinstance(self._pages, ArenaPool)
        while pool.num_free < count:
            if any(self._compact(other) for other in arena.pools if other is not pool):
                continue
            if pool is self._pages:
                wanted = count - pool.num_free
            else:
                wanted = max(1, self._pages.per_piece - self._pages.num_loose)
            released = self.evict(self._tree.evict_one, wanted)
            if not released.pages and not released.slots:
                return

    def _compact(self, pool: ArenaPool) -> bool:
        """Move units of a pool together so that a piece of it becomes free. False when none can: states of requests
        are not moved."""
        if pool.num_loose < pool.per_piece:
            return False
        if pool is self._pages:
            moves = pool.plan_moves(lambda page: True)
        elif pool is self._checkpoints:
            locked = {lock.node.slot for lock in self._locks() if lock.node is not None}
            owned = {node.slot for _, node in self._tree.nodes() if node.slot is not None} - locked
            moves = pool.plan_moves(lambda slot: slot in owned)
        else:
            return False
        if not moves:
            return False
        self._move_contents(pool, moves)
        # The contents are copied; what follows cannot fail.
        if pool is self._pages:
            self._repoint_pages(moves)
        else:
            for _, node in self._tree.nodes():
                if node.slot in moves:
                    node.slot = moves[node.slot]
        pool.move(moves)
        self.num_moved += len(moves)
        return True

    def _move_contents(self, pool: ArenaPool, moves: dict[int, int]) -> None:
        memory = self._memory
        if memory.stores_smaller and pool is self._checkpoints:
            assert memory.store is not None
            memory.store.move_stored(moves)
        elif memory.mover is not None and pool is self._pages:
            memory.mover.move_pages(moves)
        elif memory.mover is not None:
            memory.mover.move_states(moves)

    def _repoint_pages(self, moves: dict[int, int]) -> None:
        """Replace the ids of moved pages, in the tree and in block tables.

        The node that a page was inserted with owns it, or, after splits, one above. Those below may have been removed
        since.
        """
        for old, new in moves.items():
            node = self._inserted_with[old]
            while node is not None and (node.parent is None or old not in node.pages):
                node = node.parent or node.former_parent
            if node is not None:
                node.pages[node.pages.index(old)] = new
            self._inserted_with[new] = node
        for lease in self._leases:
            table = lease.block_table
            if not moves.keys().isdisjoint(table):
                for index, page in enumerate(table):
                    table[index] = moves.get(page, page)
