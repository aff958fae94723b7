"""Making room: indices from the pools, and what the tree lets go of when they run out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hybrid.cache.lease import Lease, Pin
from hybrid.memory.arena import Arena, ArenaPool
from hybrid.memory.memory import CacheMemory, Pool
from hybrid.tree.node import Lock, Node, Released, StateLock
from hybrid.tree.tree import Tree


class Room:
    """Pools of pages and states over one tree.

    Args:
        memory: the pools, and who moves their contents.
        leases, pins: who holds what; for the locks, and to be told of moves.
    """

    def __init__(self, tree: Tree, memory: CacheMemory, leases: Collection[Lease], pins: Collection[Pin]) -> None:
        self.tree = tree
        self.memory = memory
        self.pages = memory.pages
        self.states = memory.states
        self.checkpoints = memory.checkpoints
        self.evicted_pages = 0
        self.evicted_checkpoints = 0
        self.moved = 0
        self._owners: list[Node | None] = [None] * memory.pages.size if memory.arena is not None else []
        self._arena = memory.arena
        self._leases = leases
        self._pins = pins

    def take_pages(self, count: int) -> list[int] | None:
        """So many pages. None, and nothing evicted, when evicting everything would not suffice."""
        if count > self.pages.num_free:
            if count > self._most_pages():
                return None
            if self._arena is not None:
                self._make(self._arena, self.pages, count)
            else:
                self.evict(self.tree.evict_pages, count - self.pages.num_free)
        return self.pages.allocate(count)

    def take_state(self) -> int | None:
        """A state slot for a request."""
        return self._take_slot(self.states)

    def take_checkpoint(self) -> int | None:
        """A place for a checkpoint of the tree."""
        return self._take_slot(self.checkpoints)

    def _take_slot(self, pool: Pool) -> int | None:
        if not pool.num_free:
            if self._arena is not None:
                if self._can_have_slot(self._arena, pool):
                    self._make(self._arena, pool, 1)
            else:
                self.evict(self.tree.evict_checkpoints, 1)
        slots = pool.allocate(1)
        return slots[0] if slots else None

    def evict(self, give_up: Callable[..., Released], *amount: int) -> Released:
        """Have the tree give something up, and free it: what it gave up before something raised, too."""
        released = Released()
        try:
            give_up(*amount, released=released)
        finally:
            self.let_go(released)
        return released

    def let_go(self, released: Released) -> None:
        """Free what the tree gave up."""
        self.pages.free(released.pages)
        self.checkpoints.free(released.slots)
        self.evicted_pages += len(released.pages)
        self.evicted_checkpoints += len(released.slots)

    def adopted(self, pages: Sequence[int], node: Node) -> None:
        """Note that a new node owns these pages, to find them again when they are to be moved."""
        if self._arena is not None:
            owners = self._owners
            for page in pages:
                owners[page] = node

    def private(self) -> tuple[int, int]:
        """Pages, and states, that belong to requests: from counts alone, for any thread."""
        if self._arena is None:
            pages = self.pages.capacity - self.pages.num_free - self.tree.num_pages
            states = self.states.capacity - self.states.num_free - self.tree.num_checkpoints
        else:
            assert isinstance(self.pages, ArenaPool) and isinstance(self.states, ArenaPool)
            pages = self.pages.num_used - self.tree.num_pages
            states = self.states.num_used
            if self.checkpoints is self.states:
                states -= self.tree.num_checkpoints
        return max(0, pages), max(0, states)

    def pinned_share(self) -> float:
        """The part of the memory that pins keep: of the scarcer kind where the kinds do not share it."""
        locks: list[Lock] = [lock for pin in self._pins for lock in (pin.page_lock, pin.state_lock)]
        pages, checkpoints = self.tree.num_locked_pages(locks), self.tree.num_locked_checkpoints(locks)
        if self._arena is None:
            return max(pages / self.pages.capacity, checkpoints / self.checkpoints.capacity)
        return pages / self.pages.capacity + checkpoints / self.checkpoints.capacity

    def locks(self) -> list[Lock]:
        """Every lock that is held."""
        held = [lock for lease in self._leases for lock in (lease.page_lock, lease.state_lock) if lock is not None]
        return [*held, *(lock for pin in self._pins for lock in (pin.page_lock, pin.state_lock))]

    def _most_pages(self) -> int:
        """Pages that could be had by evicting everything that may go."""
        if self._arena is None:
            return self.pages.num_free + self.tree.num_pages - self.tree.num_locked_pages(self.locks())
        assert isinstance(self.pages, ArenaPool)
        kept = sum(len(pieces) for pieces in self._kept_slots().values())
        return (self._arena.num_pieces - kept) * self.pages.per_piece - self._kept_pages()

    def _kept_pages(self) -> int:
        """Pages that requests own, and those that locks keep."""
        private = sum(len(lease.block_table) - lease.num_shared for lease in self._leases)
        return private + self.tree.num_locked_pages(self.locks())

    def _kept_slots(self) -> dict[int, dict[int, int]]:
        """Per kind of state, by id of its pool: the pieces that it will keep, and how many of their slots. Those of
        requests cannot be moved, those of locked checkpoints are not."""
        assert isinstance(self.states, ArenaPool) and isinstance(self.checkpoints, ArenaPool)
        kept: dict[int, dict[int, int]] = {id(self.states): {}, id(self.checkpoints): {}}
        held = [(self.states, slot) for slot in range(self.states.reserved)]
        held += [(self.states, slot) for lease in self._leases for slot in lease.private_slots()]
        locked = {lock.node.slot for lock in self.locks() if isinstance(lock, StateLock) and lock.node is not None}
        held += [(self.checkpoints, slot) for slot in locked if slot is not None]
        for pool, slot in held:
            pieces = kept[id(pool)]
            pieces[slot // pool.per_piece] = pieces.get(slot // pool.per_piece, 0) + 1
        return kept

    def _can_have_slot(self, arena: Arena, pool: Pool) -> bool:
        """Whether evicting everything that may go would yield a slot: beside one that is kept, or in a piece of its
        own."""
        assert isinstance(pool, ArenaPool) and isinstance(self.pages, ArenaPool)
        kept = self._kept_slots()
        if any(used < pool.per_piece for used in kept[id(pool)].values()):
            return True
        return sum(map(len, kept.values())) + -(-self._kept_pages() // self.pages.per_piece) < arena.num_pieces

    # One budget

    def _make(self, arena: Arena, pool: Pool, count: int) -> None:
        """Have `count` units of a pool free, if it can be done: what lies scattered is moved together first, then the
        least worth keeping goes."""
        assert isinstance(pool, ArenaPool) and isinstance(self.pages, ArenaPool)
        while pool.num_free < count:
            if any(self._compact(other) for other in arena.pools if other is not pool):
                continue
            if pool is self.pages:
                wanted = count - pool.num_free
            else:
                wanted = max(1, self.pages.per_piece - self.pages.num_loose)
            released = self.evict(self.tree.evict_one, wanted)
            if not released.pages and not released.slots:
                return

    def _compact(self, pool: ArenaPool) -> bool:
        """Move units of a pool together so that a piece of it comes free. False when none can: states of requests stay
        where they are."""
        if pool.num_loose < pool.per_piece:
            return False
        if pool is self.pages:
            moves = pool.plan_moves(lambda page: True)
        elif pool is self.checkpoints:
            kept = {lock.node.slot for lock in self.locks() if lock.node is not None}
            owned = {node.slot for _, node in self.tree.nodes() if node.slot is not None} - kept
            moves = pool.plan_moves(lambda slot: slot in owned)
        else:
            return False
        if not moves:
            return False
        memory = self.memory
        if memory.stores_smaller and pool is self.checkpoints:
            assert memory.store is not None
            memory.store.move_stored(moves)
        elif memory.mover is not None:
            if pool is self.pages:
                memory.mover.move_pages(moves)
            else:
                memory.mover.move_states(moves)
        # The copies are made; from here on the books are moved, which cannot fail.
        if pool is self.pages:
            self._repoint_pages(moves)
        else:
            for _, node in self.tree.nodes():
                if node.slot in moves:
                    node.slot = moves[node.slot]
        pool.move(moves)
        self.moved += len(moves)
        return True

    def _repoint_pages(self, moves: dict[int, int]) -> None:
        """Have whoever names a moved page name its new place.

        The node that a page came with owns it, or, after splits, one above. Those below may have been removed since.
        """
        for old, new in moves.items():
            node = self._owners[old]
            while node is not None and (node.parent is None or old not in node.pages):
                node = node.parent or node.was_below
            if node is not None:
                node.pages[node.pages.index(old)] = new
            self._owners[new] = node
        for lease in self._leases:
            table = lease.block_table
            if not moves.keys().isdisjoint(table):
                for at, page in enumerate(table):
                    table[at] = moves.get(page, page)
