"""Making room: indices from the pools, and what the tree lets go of when they run out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from hybrid.arena import Arena, ArenaPool
from hybrid.lease import Lease, Pin
from hybrid.node import Lock, Released
from hybrid.pool import IndexPool
from hybrid.tree import Tree

Pool = IndexPool | ArenaPool


class Mover(Protocol):
    """Moves the contents of memory."""

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy pages from their old place to a new one."""
        ...

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy state slots likewise."""
        ...

    def move_records(self, moves: dict[int, int]) -> None:
        """Copy records of stored checkpoints likewise."""
        ...


class Room:
    """Pools of pages and states over one tree.

    Args:
        pages, states: the pools.
        checkpoints: the pool of what the tree keeps as checkpoints: `states` itself, unless they are stored smaller.
        arena: the pieces, when the pools share one budget; None for pools of fixed sizes.
        mover: moves contents along, where there are any.
        leases, pins: who holds what; for the locks, and to be told of moves.
    """

    def __init__(
        self,
        tree: Tree,
        pages: Pool,
        states: Pool,
        checkpoints: Pool,
        arena: Arena | None,
        mover: Mover | None,
        leases: Collection[Lease],
        pins: Collection[Pin],
    ) -> None:
        self.tree = tree
        self.pages = pages
        self.states = states
        self.checkpoints = checkpoints
        self.evicted_pages = 0
        self.evicted_checkpoints = 0
        self.moved = 0
        self._arena = arena
        self._mover = mover
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
                self.let_go(self.tree.evict_pages(count - self.pages.num_free))
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
                self._make(self._arena, pool, 1)
            else:
                self.let_go(self.tree.evict_checkpoints(1))
        slots = pool.allocate(1)
        return slots[0] if slots else None

    def let_go(self, released: Released) -> None:
        """Free what the tree gave up."""
        self.pages.free(released.pages)
        self.checkpoints.free(released.slots)
        self.evicted_pages += len(released.pages)
        self.evicted_checkpoints += len(released.slots)

    def spare_share(self) -> float:
        """The part of the memory for states that is free."""
        if self._arena is not None:
            return self._arena.num_free / self._arena.num_pieces
        return self.states.num_free / self.states.capacity

    def largest_request(self) -> int:
        """Pages that a request could have if it were alone: two states are its own and that of its checkpoint."""
        if self._arena is None:
            return self.pages.capacity
        return self._pages_beside(2)

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
        locks = self.locks()
        locked = self.tree.num_locked_pages(locks)
        if self._arena is None:
            return self.pages.num_free + self.tree.num_pages - locked
        private = sum(len(lease.block_table) - lease.num_shared for lease in self._leases)
        states = sum(len(lease.private_slots()) for lease in self._leases)
        if self.checkpoints is self.states:
            states += self.tree.num_locked_checkpoints(locks)
        return self._pages_beside(states) - private - locked

    def _pages_beside(self, num_states: int) -> int:
        """Pages in the pieces that so many states, and the empty one, leave."""
        assert self._arena is not None and isinstance(self.states, ArenaPool) and isinstance(self.pages, ArenaPool)
        pieces = -(-(num_states + self.states.reserved) // self.states.per_piece)
        return max(0, self._arena.num_pieces - pieces) * self.pages.per_piece

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
            released = self.tree.evict_one(wanted)
            if not released.pages and not released.slots:
                return
            self.let_go(released)

    def _compact(self, pool: ArenaPool) -> bool:
        """Move units of a pool together so that a piece of it comes free. False when none can."""
        if pool.num_loose < pool.per_piece:
            return False
        if pool is self.pages:
            moves = pool.plan_moves(lambda page: True)
        else:
            kept = {lock.node.slot for lock in self.locks() if lock.node is not None}
            owned = {node.slot for _, node in self.tree.nodes() if node.slot is not None} - kept
            moves = pool.plan_moves(lambda slot: slot in owned) if pool is self.checkpoints else None
        if not moves:
            return False
        move: Callable[[dict[int, int]], None] | None = None
        if self._mover is not None:
            if pool is self.pages:
                move = self._mover.move_pages
            else:
                move = self._mover.move_states if pool is self.states else self._mover.move_records
            move(moves)
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
        old = moves.keys()
        tables: Iterable = [node.pages for _, node in self.tree.nodes()]
        for table in (*tables, *(lease.block_table for lease in self._leases)):
            if not old.isdisjoint(table):
                for at, page in enumerate(table):
                    if page in moves:
                        table[at] = moves[page]
