"""Opening and closing leases: match, lock and allocate, all of it or nothing; and give everything back."""

from __future__ import annotations

from array import array

from hybrid.cache.allocator import Allocator
from hybrid.cache.explain import explain, not_started
from hybrid.cache.lease import Lease
from hybrid.errors import OwnershipError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Match, PrefixHistory
from hybrid.tree.tree import Tree
from hybrid.units import ceil_div


class Opener:
    """Opens and closes the leases of a cache.

    Args:
        tree: what is matched and locked.
        memory: the pools.
        allocator: allocates from them, and locks checkpoints.

    Attributes:
        leases: those that are open.
        tree: as given.
    """

    def __init__(self, tree: Tree, memory: CacheMemory, allocator: Allocator) -> None:
        self.leases: set[Lease] = set()
        self.tree: Tree = tree
        self._memory = memory
        self._allocator = allocator

    def open(self, key: Key, limit: int, num_tokens: int, priority: int = 0, tenant: str | None = None) -> Lease | None:
        """See `HybridCache.begin`, which has checked the arguments."""
        found = self.tree.peek(key, limit)
        past = self.tree.recall(key, found, limit)
        lease = self.hold(key, found, num_tokens)
        if lease is None:
            return None
        found = found._replace(deepest=lease.shared_node)  # what follows the match may have been evicted
        lease.explanation = explain(self.tree, key, limit, found, past)
        lease.priority, lease.tenant = priority, tenant
        try:
            self._use(lease, limit, found, past)
        except BaseException:
            self.close(lease)
            raise
        return lease

    def hold(self, key: Key, found: Match, num_tokens: int) -> Lease | None:
        """Open with what was found without counting it as a request: the policy learns nothing of it. None if there is
        no memory for it."""
        lease = self._lease(key, found)
        self.leases.add(lease)
        opened = False
        try:
            if found.deepest is not None:
                lease.page_lock = self.tree.lock_match(found)
                self._allocator.share(lease)
            if found.checkpoint is not None:
                assert found.checkpoint.slot is not None
                lease.state_lock, lease.read_slot = self._allocator.lock_state(found.checkpoint), found.checkpoint.slot
            num_pages = ceil_div(num_tokens, self.tree.page_size) - lease.num_shared
            allocated = self._allocator.allocate_request(max(0, num_pages))
            if allocated is not None:
                opened = True
                lease.front, pages = allocated
                self._allocator.give_pages(lease, pages)
                if self._memory.stores_smaller:
                    self._restore(lease)
        except BaseException:
            self.close(lease)
            raise
        if opened:
            return lease
        self.close(lease)
        return None

    def resume(self, lease: Lease, num_tokens: int) -> None:
        """Have a lease that has computed nothing yet resume from a deeper checkpoint, which the tree has meanwhile."""
        node = self.tree.peek(lease.key, num_tokens).checkpoint
        assert node is not None and node.slot is not None and node.end == num_tokens
        former, lease.state_lock = lease.state_lock, self._allocator.lock_state(node)
        lease.read_slot, lease.front_tokens, lease.num_hit_tokens = node.slot, num_tokens, num_tokens
        if former is not None:
            self._allocator.unlock(former)
        if lease.branching_len is not None and lease.branching_len <= num_tokens:
            lease.branching_len = None
        if self._memory.stores_smaller:
            self._restore(lease)

    def refuse_closed(self, lease: Lease, even_void: bool) -> None:
        """Refuse a lease that is not one of the open ones, or that can only be closed.

        Args:
            even_void: accept one of which a pass was discarded, or that waits for a disk.

        Raises:
            OwnershipError: it is refused.
        """
        if not isinstance(lease, Lease) or lease not in self.leases:
            raise OwnershipError("this lease was closed before, or belongs to another cache")
        if lease.is_void and not even_void:
            raise OwnershipError("a pass of this lease was discarded: it can only be closed")
        if lease.restoring is not None and not even_void:
            raise OwnershipError("this lease waits for copies from disk: call proceed until it returns True, or close")

    def close(self, lease: Lease) -> None:
        """Give back everything that a lease holds, which must be open."""
        self.leases.remove(lease)
        if lease.front_tokens >= lease.num_input:
            self.tree.ended(lease.path, lease.front_tokens - lease.num_input)
        if lease.restoring is not None:
            lease.restoring.drop()
            lease.restoring = None
        for lock in lease.locks:
            self._allocator.unlock(lock)
        lease.page_lock = lease.state_lock = None
        if lease.num_shared:
            self._allocator.unshare(lease)
        self._allocator.free_pages(lease.private_pages)
        self._allocator.free_states(lease.private_slots())
        lease.block_table = array("i")
        lease.num_shared = 0
        lease.captured = []
        lease.front, lease.back = EMPTY_STATE, None

    def _lease(self, key: Key, found: Match) -> Lease:
        """Make a lease of what was found, before anything is locked or allocated."""
        return Lease(
            key=key,
            num_known=len(key),
            front=EMPTY_STATE,
            read_slot=EMPTY_STATE,
            front_tokens=found.num_tokens,
            num_hit_tokens=found.num_tokens,
            branching_len=found.branching_len,
            explanation=not_started(len(key)),
            block_table=self.tree.pages(found.deepest, found.num_page_tokens),
            num_shared=found.num_page_tokens // self.tree.page_size,
            page_lock=None,
            state_lock=None,
        )

    def _use(self, lease: Lease, limit: int, found: Match, past: PrefixHistory) -> None:
        """Count the use of what was found, and of what is gone."""
        self.tree.touch(found)
        lease.turn, lease.lost = past.turn, past.gone
        lease.path = self.tree.report_misses(found, past, limit)
        lease.num_input = limit + 1
        known = lease.key.whole(past.num_tokens, self.tree.grid)
        if known > max(found.num_tokens, lease.branching_len or 0):
            lease.branching_len = known  # its pages were evicted, but it was here

    def _restore(self, lease: Lease) -> None:
        """Checkpoints are stored smaller than states: the one that was found is restored to the front at once."""
        lock, lease.state_lock = lease.state_lock, None
        if lock is None:
            return
        place, lease.read_slot = lease.read_slot, lease.front
        try:
            self._memory.contents.restore(place, lease.front)
        finally:
            self._allocator.unlock(lock)
