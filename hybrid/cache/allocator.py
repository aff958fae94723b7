"""Allocating pages and state slots: from the pools, and from what the tree evicts when they run out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from hybrid.cache.lease import Lease
from hybrid.cache.stats import CacheStats
from hybrid.memory.arena import ArenaPool
from hybrid.memory.digests import Digests
from hybrid.memory.memory import CacheMemory, Pool
from hybrid.tree.node import Lock, Node, Released, StateLock
from hybrid.tree.tree import Tree
from hybrid.units import ceil_div


class Allocator:
    """Allocates units of a memory, and has the tree evict for them.

    An allocation that cannot succeed, whatever is evicted, returns None and evicts nothing. In an elastic memory units
    that are in the way are moved together before anything is evicted. What could be evicted is known from counts, which
    are kept as units and locks are taken and given back: all locks on checkpoints go through here.

    Args:
        tree: evicts.
        memory: the pools, and who moves their contents.
        stats: counts what is evicted and moved.
        digests: of what the tree owns; None: contents are not verified.
        on_evict: called with what the tree has evicted, before it is freed.
    """

    def __init__(
        self,
        tree: Tree,
        memory: CacheMemory,
        stats: CacheStats,
        digests: Digests | None = None,
        on_evict: Callable[[Released], None] | None = None,
    ) -> None:
        self._tree = tree
        self._memory = memory
        self._stats = stats
        self._pages = memory.pages
        self._states = memory.states
        self._checkpoints = memory.checkpoints
        self._uploads = memory.uploads
        self._on_evict = on_evict
        self._digests = digests
        self._compactor = _Compactor(memory, stats, digests) if memory.arena is not None else None
        self._unevictable_states = UnevictableSlots(memory.states.per_piece, memory.states.reserved)
        self._unevictable_checkpoints = self._unevictable_states  # where checkpoints are state slots
        if memory.stores_smaller:
            self._unevictable_checkpoints = UnevictableSlots(memory.checkpoints.per_piece, 0)

    # Allocating

    def allocate_pages(self, count: int) -> list[int] | None:
        """Allocate `count` pages."""
        if count > self._pages.num_free:
            if count > self._max_pages():
                return None
            self._make_free(self._pages, count)
        return self._pages.allocate(count)

    def allocate_state(self) -> int | None:
        """Allocate a state slot of a request."""
        slot = self._allocate_slot(self._states)
        if slot is not None:
            self._unevictable_states.add(slot)
        return slot

    def allocate_checkpoint(self) -> int | None:
        """Allocate the place of a stored checkpoint of the tree."""
        return self._allocate_slot(self._checkpoints)

    def allocate_new_checkpoint(self) -> int | None:
        """Allocate the place of a checkpoint as it is stored, which belongs to no lease: for `Committer.adopt`."""
        return self.allocate_checkpoint() if self._memory.stores_smaller else self.allocate_state()

    def free_checkpoint(self, place: int) -> None:
        """Free the place of a checkpoint that the tree does not own."""
        if self._memory.stores_smaller:
            self._uploads.wait_if_pending(checkpoints=[place])
            self._checkpoints.free([place])
        else:
            self.free_states([place])

    def allocate_request(self, num_pages: int) -> tuple[int, list[int]] | None:
        """Allocate a state slot and `num_pages` pages, or nothing: then nothing was evicted."""
        if not self._has_request(num_pages):
            return None
        slot = self.allocate_state()
        if slot is None:
            return None
        try:
            pages = self.allocate_pages(num_pages)
        except BaseException:
            self.free_states([slot])
            raise
        if pages is None:
            self.free_states([slot])
            return None
        return slot, pages

    def give_pages(self, lease: Lease, pages: Sequence[int]) -> None:
        """Append pages that were allocated for a request to its block table."""
        if self._compactor is not None:
            self._compactor.note_private(lease, pages)
        lease.block_table.extend(pages)

    def swap_pages(self, lease: Lease, first: int, second: int) -> None:
        """Have two private pages of a request change places in its block table."""
        table = lease.block_table
        table[first], table[second] = table[second], table[first]
        if self._compactor is not None:
            for place in (first, second):
                self._compactor.note_place(table[place], place)

    def free_pages(self, pages: Sequence[int]) -> None:
        """Free pages of a request."""
        self._uploads.wait_if_pending(pages=pages)
        self._pages.free(pages)
        if self._compactor is not None:
            self._compactor.forget_pages(pages)

    def free_states(self, slots: Sequence[int]) -> None:
        """Free state slots of a request."""
        if not self._memory.stores_smaller:
            self._uploads.wait_if_pending(checkpoints=slots)
        self._states.free(slots)
        self._unevictable_states.remove(slots)

    def num_private(self) -> tuple[int, int]:
        """Count the pages, and the state slots, that belong to requests: from counts alone, for any thread."""
        pages, states = self._pages.num_used - self._tree.num_pages, self._states.num_used
        if not self._memory.stores_smaller:
            states -= self._tree.num_checkpoints
        return max(0, pages), max(0, states)

    # What the tree owns, and what is locked in it

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

    def share(self, lease: Lease) -> None:
        """Record that the tree owns pages of a lease from now on."""
        if self._compactor is not None:
            self._compactor.note_sharer(lease)

    def unshare(self, lease: Lease) -> None:
        """Record that a lease that may share pages of the tree is about to be closed."""
        if self._compactor is not None:
            self._compactor.forget_sharer(lease)

    def hand_over_pages(self, pages: Sequence[int], node: Node) -> None:
        """Record that pages moved from a lease to `node`, which was inserted with them."""
        if self._digests is not None:
            self._digests.note_pages(pages)
        if self._compactor is not None:
            self._compactor.note_pages(pages, node)

    def hand_over_checkpoint(self, slot: int, node: Node) -> None:
        """Record that a checkpoint moved from a lease to `node`."""
        if self._digests is not None:
            self._digests.note_checkpoint(slot)
        if self._compactor is not None:
            self._compactor.note_checkpoint(slot, node)
        if not self._memory.stores_smaller:
            self._unevictable_states.remove([slot])

    def lock_state(self, node: Node) -> StateLock:
        """Protect the checkpoint of a node, and its pages with it."""
        lock = self._tree.lock_state(node)
        self._count_lock(node)
        return lock

    def pin(self, node: Node) -> StateLock:
        """Lock as `lock_state` does, for a pin."""
        lock = self._tree.pin(node)
        self._count_lock(node)
        return lock

    def unlock(self, lock: Lock) -> None:
        """Release a lock.

        Raises:
            LockError: it was released before, or belongs to another tree. Nothing was changed.
        """
        node = lock.node
        self._tree.unlock(lock)
        if isinstance(lock, StateLock):
            assert node is not None and node.slot is not None
            if not node.state_locks:
                self._unevictable_checkpoints.remove([node.slot])

    def _count_lock(self, node: Node) -> None:
        if node.state_locks == 1:
            assert node.slot is not None
            self._unevictable_checkpoints.add(node.slot)

    def _free(self, released: Released) -> None:
        self._uploads.wait_if_pending(released.pages, released.slots)
        if self._on_evict is not None:
            self._on_evict(released)
        if self._compactor is not None:
            self._compactor.forget_checkpoints(released.slots)
            self._compactor.forget_pages(released.pages)
        if self._digests is not None:
            self._digests.forget(released.pages, released.slots)
        self._pages.free(released.pages)
        self._checkpoints.free(released.slots)
        self._stats.evicted_pages += len(released.pages)
        self._stats.evicted_checkpoints += len(released.slots)

    # What evicting could yield

    def _max_pages(self, extra_pieces: int = 0) -> int:
        """Count the pages that could be free if everything that is not locked were evicted, next to `extra_pieces`
        pieces more of states."""
        arena = self._memory.arena
        if arena is None:
            return self._pages.capacity - self._num_unevictable_pages()
        num_pieces = arena.num_pieces - self._num_unevictable_pieces() - extra_pieces
        return num_pieces * self._pages.per_piece - self._num_unevictable_pages()

    def _has_request(self, num_pages: int) -> bool:
        """Tell whether evicting everything that is not locked yields a state slot and `num_pages` pages.

        The slot may need a piece of its own, unless the next free one is in a piece that stays anyway.
        """
        if not isinstance(self._states, ArenaPool):
            return num_pages <= self._max_pages()  # a state slot is allocated before anything is evicted for pages
        if num_pages == 0:
            return self._states.num_free > 0 or self._may_yield_slot(self._states)
        piece = self._states.next_piece
        extra = 0 if piece is not None and self._unevictable_states.are_in(piece) else 1
        return num_pages <= self._max_pages(extra)

    def _may_yield_slot(self, pool: Pool) -> bool:
        """Tell whether evicting everything that is not locked yields a slot: in a piece with one that stays, or in a
        piece of its own. Of fixed pools only an attempt can tell."""
        arena = self._memory.arena
        if arena is None:
            return True
        slots = self._unevictable_states if pool is self._states else self._unevictable_checkpoints
        if slots.num_partial:
            return True
        pieces_of_pages = ceil_div(self._num_unevictable_pages(), self._pages.per_piece)
        return self._num_unevictable_pieces() + pieces_of_pages < arena.num_pieces

    def _num_unevictable_pieces(self) -> int:
        """Count the pieces that hold states whatever is evicted."""
        apart = self._unevictable_checkpoints is not self._unevictable_states
        return self._unevictable_states.num_pieces + (self._unevictable_checkpoints.num_pieces if apart else 0)

    def _num_unevictable_pages(self) -> int:
        """Count the pages that requests own, and those that locks protect."""
        return self._pages.num_used - self._tree.num_pages + self._tree.locks.num_pages

    def _allocate_slot(self, pool: Pool) -> int | None:
        if not pool.num_free and self._may_yield_slot(pool):
            self._make_free(pool, 1)
        slots = pool.allocate(1)
        return slots[0] if slots else None

    def _make_free(self, pool: Pool, count: int) -> None:
        """Have `count` units of a pool free, if that is possible: units that are in the way are moved together first,
        then what is worth least is evicted."""
        pages, arena, compactor = self._pages, self._memory.arena, self._compactor
        if not isinstance(pages, ArenaPool) or arena is None or compactor is None:
            evict = self._tree.evict_pages if pool is pages else self._tree.evict_checkpoints
            self.evict(evict, count - pool.num_free)
            return
        while pool.num_free < count:
            if any(compactor.compact(other) for other in arena.pools if other is not pool):
                continue
            wanted = count - pool.num_free if pool is pages else max(1, pages.per_piece - pages.num_loose)
            released = self.evict(self._tree.evict_one, wanted)
            if not released.pages and not released.slots:
                return


class UnevictableSlots:
    """The state slots that cannot be evicted now, counted per piece of an arena: those of requests, which are never
    moved, and those of locked checkpoints.

    Args:
        per_piece: slots in a piece.
        reserved: the first `reserved` slots can never be evicted.

    Attributes:
        num_partial: pieces with such a slot in which other slots are free, or can be evicted.
    """

    def __init__(self, per_piece: int, reserved: int) -> None:
        self.num_partial: int = 0
        self._per_piece = per_piece
        self._counts: dict[int, int] = {}
        for slot in range(reserved):
            self.add(slot)

    @property
    def num_pieces(self) -> int:
        """Pieces with such a slot."""
        return len(self._counts)

    def are_in(self, piece: int) -> bool:
        """Tell whether a piece has such a slot."""
        return piece in self._counts

    def add(self, slot: int) -> None:
        """Record that a slot cannot be evicted from now on."""
        piece = slot // self._per_piece
        count = self._counts.get(piece, 0) + 1
        self._counts[piece] = count
        self.num_partial += (count < self._per_piece) - (1 < count <= self._per_piece)

    def remove(self, slots: Iterable[int]) -> None:
        """Record that slots can be evicted, or are free."""
        for slot in slots:
            piece = slot // self._per_piece
            count = self._counts.pop(piece) - 1
            if count:
                self._counts[piece] = count
            self.num_partial += (0 < count < self._per_piece) - (count + 1 < self._per_piece)


class _Compactor:
    """Moves pages, and checkpoints of the tree that are not locked. States of requests stay where they are.

    It knows which node or lease owns which unit, so that no move walks the tree, or the block tables of leases that do
    not share the page: a move costs the same in a memory of any size.

    Args:
        memory: the pools, and who moves their contents.
        stats: counts what is moved.
        digests: they follow too; None: there are none.
    """

    def __init__(self, memory: CacheMemory, stats: CacheStats, digests: Digests | None) -> None:
        self._memory = memory
        self._stats = stats
        self._digests = digests
        # Per page, the lease that it is private to, or the node that it was inserted with: where to look for its owner.
        self._owners: list[Lease | Node | None] = [None] * memory.pages.size
        self._places = array("i", bytes(4 * memory.pages.size))  # per page, how many are before it on its path
        self._sharers: dict[int, dict[Lease, None]] = {}  # leases that share pages of the tree, by their first page
        self._checkpoints: dict[int, Node] = {}

    def note_private(self, lease: Lease, pages: Sequence[int]) -> None:
        """Record that pages are about to follow those of a lease."""
        for place, page in enumerate(pages, len(lease.block_table)):
            self._owners[page] = lease
            self._places[page] = place

    def note_place(self, page: int, place: int) -> None:
        """Record that a private page is at another place in the block table of its lease."""
        self._places[page] = place

    def note_pages(self, pages: Iterable[int], node: Node) -> None:
        """Record that a node was inserted with pages that were private to a lease."""
        for page in pages:
            self._owners[page] = node

    def forget_pages(self, pages: Iterable[int]) -> None:
        """Record that pages are free."""
        for page in pages:
            self._owners[page] = None

    def note_sharer(self, lease: Lease) -> None:
        """Record that a lease shares pages of the tree from now on."""
        self._sharers.setdefault(lease.block_table[0], {})[lease] = None

    def forget_sharer(self, lease: Lease) -> None:
        """Record that a lease that may share pages of the tree is about to be closed."""
        first = lease.block_table[0]
        sharers = self._sharers.get(first, {})
        sharers.pop(lease, None)
        if not sharers:
            self._sharers.pop(first, None)

    def note_checkpoint(self, slot: int, node: Node) -> None:
        """Record that a node owns the checkpoint in a slot."""
        self._checkpoints[slot] = node

    def forget_checkpoints(self, slots: Iterable[int]) -> None:
        """Record that checkpoints were evicted."""
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
        self._stats.moved_pages += len(moves)
        return True

    def _may_move(self, slot: int) -> bool:
        node = self._checkpoints.get(slot)
        return node is not None and not node.page_locks

    def _move_contents(self, pool: ArenaPool, moves: dict[int, int]) -> None:
        contents = self._memory.contents
        if pool is self._memory.pages:
            contents.move_pages(moves)
        elif self._memory.stores_smaller:
            contents.move_stored(moves)
        else:
            contents.move_states(moves)

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
