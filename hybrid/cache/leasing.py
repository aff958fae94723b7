"""The life of a lease: the one place where pages and state slots change hands.

Every page and every state slot is, at every moment, free, private to one lease, or owned by one node of the tree. A
*lease* is what one running request holds. Its life:

    open      match; lock pages to the page hit and the checkpoint at the usable hit; take a front slot and pages
    reserve   take private pages for the tokens to come
    capture   take a slot for a checkpoint that the next forward pass writes
    advance   a pass is done: the front is valid after so many tokens; the matched checkpoint is unlocked
    commit    hand finished pages and captured checkpoints to the tree; duplicates are freed, the block table points
              at the tree's
    close     give everything back

An allocation that fails changes nothing: the call returns None or False.
"""

from __future__ import annotations

import threading
import time
from array import array

from hybrid.cache.allocator import Room
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import Explanation, explain
from hybrid.cache.lease import CacheStats, Lease, Pin
from hybrid.errors import OwnershipError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Checkpoint, Lock, Match
from hybrid.tree.policies import policy_of
from hybrid.tree.policy import INTERVAL, PROMPT_END, TURN_END
from hybrid.tree.tree import Tree

GHOSTS_PER_PAGE, MIN_GHOSTS = 4, 1 << 17
"""The tree remembers so many evicted prefixes for each page of the memory, and at least so many: about 15 MB."""


class Leasing:
    """What a cache does for running requests; see `HybridCache`.

    Attributes:
        keeps: what requests computed is kept for others.
    """

    keeps = True

    def __init__(self, memory: CacheMemory, config: CacheConfig | None = None) -> None:
        self.config: CacheConfig = config if config is not None else CacheConfig()
        self.memory: CacheMemory = memory
        max_ghosts = max(MIN_GHOSTS, GHOSTS_PER_PAGE * memory.pages.capacity)
        policy = policy_of(self.config.eviction)
        self.tree = Tree(self.config.page_size, self.config.grid, policy, memory.prices, max_ghosts, self.config.seed)
        self.pages = memory.pages
        self.states = memory.states
        self.checkpoints = memory.checkpoints
        self.arena = memory.arena
        self.leases: set[Lease] = set()
        self.pins: list[Pin] = []  # in the order in which they were made
        self._room = Room(self.tree, memory, self.leases, self.pins)
        self._stats = CacheStats()
        if memory.sizes is not None:
            self._stats.page_bytes, self._stats.checkpoint_bytes = memory.sizes.page, memory.sizes.checkpoint
        self._owner: int | None = None

    def open(self, key: Key, limit: int, num_tokens: int, priority: int = 0) -> Lease | None:
        """Start a request that may use at most `limit` tokens of what is known. None when the memory for it cannot be
        had.

        Block tables may change while others open, reserve or capture: read them when the memory for a pass is taken.

        Args:
            limit: at most `len(key) - 1`, so that a token is left to compute.
            num_tokens: tokens to have pages for at once.
            priority: how much its checkpoints matter, for policies that ask.
        """
        self._refuse_other_threads()
        self._expire_pins()
        found = self.tree.peek(key, limit)
        lease = Lease(
            front=EMPTY_STATE,
            read_slot=EMPTY_STATE,
            front_tokens=found.num_tokens,
            num_hit_tokens=found.num_tokens,
            branching_len=found.branching_len,
            explanation=self._explain(key, limit, found),
            block_table=self.tree.pages(found.deepest, found.num_page_tokens),
            num_shared=found.num_page_tokens // self.config.page_size,
            page_lock=None,
            state_lock=None,
            priority=priority,
        )
        self.leases.add(lease)
        opened = False
        try:
            if found.deepest is not None:
                lease.page_lock = self.tree.lock_pages(found.deepest)
            if found.checkpoint is not None:
                assert found.checkpoint.slot is not None
                lease.state_lock, lease.read_slot = self.tree.lock_state(found.checkpoint), found.checkpoint.slot
            lease.front = self._room.take_state() or EMPTY_STATE
            opened = lease.front != EMPTY_STATE and self.reserve(lease, num_tokens)
            if opened and self.checkpoints is not self.states:
                self._restore(lease)
            if opened:
                self._reckon(lease, key, limit, found)
        except BaseException:
            self.close(lease)
            raise
        if not opened:
            self.close(lease)
        return lease if opened else None

    def _reckon(self, lease: Lease, key: Key, limit: int, found: Match) -> None:
        """Count the use of what was found, and look up what was once known."""
        self.tree.touch(found)
        past = self.tree.recall(key, found, limit)
        lease.turn, lease.marks = past.turn, past.gone
        known = key.whole(past.num_tokens, self.config.grid)
        if known > max(found.num_tokens, lease.branching_len or 0):
            lease.branching_len = known  # its pages have gone, but it was here

    def _restore(self, lease: Lease) -> None:
        """Checkpoints are stored smaller than states: the one that was found is restored to the front at once."""
        lock, lease.state_lock = lease.state_lock, None
        if lock is None:
            return
        record, lease.read_slot = lease.read_slot, lease.front
        try:
            assert self.memory.store is not None
            self.memory.store.restore(record, lease.front)
        finally:
            self.tree.unlock(lock)

    def record(self, explanation: Explanation) -> None:
        """Count a request and its hit in the statistics: once per request, however often its lease is opened."""
        self._refuse_other_threads()
        stats = self._stats
        stats.requests += 1
        stats.prompt_tokens += explanation.asked
        stats.usable_tokens += explanation.usable_hit
        stats.page_tokens += explanation.page_hit

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make sure that the lease has pages for its first `num_tokens` tokens. False, and nothing changed, when it
        cannot."""
        self._refuse_closed(lease)
        missing = -(-num_tokens // self.config.page_size) - len(lease.block_table)
        if missing > 0:
            pages = self._room.take_pages(missing)
            if pages is None:
                return False
            lease.block_table.extend(pages)
        return True

    def capture(self, lease: Lease, num_tokens: int, kind: str = PROMPT_END) -> Checkpoint | None:
        """Take a slot for the state after `num_tokens` tokens, which the pass under way writes. None when none can be
        had, or it would not be worth what would have to go for it.

        Args:
            kind: why it is kept: "branch", "prompt_end", "turn_end", "user".
        """
        self._refuse_closed(lease)
        if not self.checkpoints.num_free and not self._is_worth_its_room(lease, num_tokens, kind):
            return None
        return self._capture(lease, num_tokens, self._room.take_state(), kind)

    def _is_worth_its_room(self, lease: Lease, num_tokens: int, kind: str) -> bool:
        """Ask the policy. What is not is remembered all the same, so that the policy learns what it missed."""
        usage = lease.marks.setdefault(num_tokens, self.tree.new_usage(kind, lease.turn))
        usage.priority = max(usage.priority, lease.priority)
        above = [checkpoint.num_tokens for checkpoint in lease.captured if checkpoint.num_tokens < num_tokens]
        node = lease.page_lock.node if lease.page_lock is not None else None
        while node is not None and (node.slot is None or node.end >= num_tokens):
            node = node.parent
        above.append(node.end if node is not None else 0)
        return self.tree.admits(usage, num_tokens, max(above), kind == TURN_END, self.arena is not None)

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        """As `capture`, from memory that nobody else wants: nothing is evicted, and a quarter stays free."""
        self._refuse_closed(lease)
        if self.spare_share <= 0.25:
            return None
        return self._capture(lease, num_tokens, self._room.take_state(), INTERVAL)

    @property
    def spare_share(self) -> float:
        """The part of the memory for states that is free."""
        return self.memory.free_state_share

    def take_back(self, lease: Lease) -> bool:
        """Make sure that the lease has the second slot of its ping-pong pair. False when none can be had."""
        self._refuse_closed(lease)
        if lease.back is None:
            lease.back = self._room.take_state()
        return lease.back is not None

    def swap(self, lease: Lease) -> None:
        """The pass read the front and wrote the back: the back is the front now, and the old state stays behind it."""
        self._refuse_closed(lease)
        assert lease.back is not None
        lease.front, lease.back, lease.back_tokens = lease.back, lease.front, lease.front_tokens

    def advance(self, lease: Lease, num_tokens: int) -> None:
        """A pass is done: the front holds the state after `num_tokens` tokens. The matched checkpoint is not needed any
        more."""
        self._refuse_closed(lease)
        if lease.state_lock is not None:
            self.tree.unlock(lease.state_lock)
            lease.state_lock = None
        lease.read_slot = lease.front
        lease.front_tokens = num_tokens

    def commit(self, lease: Lease, key: Key, num_tokens: int) -> None:
        """Hand the pages of `[0, num_tokens)`, and the checkpoints captured there, to the tree.

        What the tree has already is freed, and the block table points at the tree's pages afterwards.

        Raises:
            OwnershipError: `num_tokens` is no multiple of the page size, or more than the lease has pages for.
        """
        self._refuse_closed(lease)
        if num_tokens % self.config.page_size or num_tokens > len(lease.block_table) * self.config.page_size:
            raise OwnershipError(
                f"commit: {num_tokens} tokens, with {len(lease.block_table)} pages of {self.config.page_size}"
            )
        num_shared = min(lease.num_shared, num_tokens // self.config.page_size)
        found = self.tree.peek(key, num_shared * self.config.page_size)
        if self.tree.pages(found.deepest, found.num_page_tokens) != lease.block_table[:num_shared]:
            raise OwnershipError("commit: the key does not begin as the one under which the lease found its pages")
        captured = {checkpoint.num_tokens: checkpoint for checkpoint in lease.captured}
        for position in sorted({*captured, *lease.marks}):
            if position <= num_tokens:
                self._insert(lease, key, position, captured.get(position))
        if num_tokens > lease.num_shared * self.config.page_size:
            self._insert(lease, key, num_tokens, None)

    def donate_states(self, lease: Lease, limit: int) -> None:
        """Offer the deepest of the lease's own states that lies on the grid and not beyond `limit`, for the next
        commit.

        It is the end of a request's life: the front or the back changes hands without a copy.
        """
        self._refuse_closed(lease)
        grid = self.config.grid
        own = lease.front != EMPTY_STATE and lease.state_lock is None
        if own and 0 < lease.front_tokens <= limit and lease.front_tokens % grid == 0:
            lease.captured.append(Checkpoint(lease.front, lease.front_tokens, TURN_END, lease.priority, lease.turn))
            lease.front = EMPTY_STATE
        elif lease.back is not None and 0 < lease.back_tokens <= limit and lease.back_tokens % grid == 0:
            lease.captured.append(Checkpoint(lease.back, lease.back_tokens, TURN_END, lease.priority, lease.turn))
            lease.back = None

    def end_turn(self, lease: Lease, num_tokens: int) -> None:
        """A request's turn ends after so many tokens, which have been committed: a checkpoint of its prompt that turns
        out to be at the last boundary of the turn is that of the turn's end."""
        self._refuse_closed(lease)
        node = lease.page_lock.node if lease.page_lock is not None else None
        boundary = num_tokens // self.config.grid * self.config.grid
        while node is not None and node.end > boundary:
            node = node.parent
        if node is not None and node.end == boundary:
            self.tree.relabel(node, PROMPT_END, TURN_END)

    def close(self, lease: Lease) -> None:
        """Give back everything the lease holds.

        Raises:
            OwnershipError: it was closed before.
        """
        self._refuse_closed(lease)
        self.leases.remove(lease)
        self._unlock(lease.page_lock, lease.state_lock)
        lease.page_lock = lease.state_lock = None
        self.pages.free(lease.block_table[lease.num_shared :])
        self.states.free(lease.private_slots())
        lease.block_table = array("i")
        lease.num_shared = 0
        lease.captured = []
        lease.front, lease.back = EMPTY_STATE, None

    def locks(self) -> list[Lock]:
        """Every lock that leases and pins hold."""
        return self._room.locks()

    def _refuse_closed(self, lease: Lease) -> None:
        self._refuse_other_threads()
        if lease not in self.leases:
            raise OwnershipError("this lease was closed before, or belongs to another cache")

    def _refuse_other_threads(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            if self._owner is not None:
                raise OwnershipError(
                    "another thread owns this cache; only stats() may be called from here. To hand the cache over, "
                    "call adopt() in the thread that is to own it"
                )
            self._owner = me

    def _explain(self, key: Key, limit: int, found: Match) -> Explanation:
        return explain(self.tree, key, limit, found)

    def _insert(self, lease: Lease, key: Key, num_tokens: int, captured: Checkpoint | None) -> None:
        page_size = self.config.page_size
        checkpoint = self._store(key, captured) if captured is not None else None
        try:
            below = lease.page_lock.node if lease.page_lock is not None else None
            if below is not None and below.end > lease.num_shared * page_size:
                below = None  # its edge goes on beyond what the key has in common with it
            pages = lease.block_table[: num_tokens // page_size]
            past = lease.marks.get(num_tokens)
            inserted = self.tree.insert(key, num_tokens, pages, checkpoint, below, past)
        except BaseException:
            if checkpoint is not None and checkpoint is not captured:
                self.checkpoints.free([checkpoint.slot])
            raise
        lease.marks.pop(num_tokens, None)
        if captured is not None:
            lease.captured.remove(captured)
            if checkpoint is not captured:
                self.states.free([captured.slot])
            if checkpoint is not None and not inserted.adopted:
                self.checkpoints.free([checkpoint.slot])
        num_existing = inserted.num_existing // page_size
        self._room.adopted(pages[num_existing:], inserted.node)
        if num_existing > lease.num_shared:
            kept = self.tree.pages(inserted.node, inserted.num_existing)
            duplicates = lease.block_table[lease.num_shared : num_existing]
            lease.block_table[:num_existing] = kept
            lease.num_shared = num_existing
            self.pages.free(duplicates)
        if num_tokens // page_size >= lease.num_shared:
            lease.num_shared = num_tokens // page_size
            old, lease.page_lock = lease.page_lock, self.tree.lock_pages(inserted.node)
            self._unlock(old)

    def _store(self, key: Key, captured: Checkpoint) -> Checkpoint | None:
        """What the tree is to keep of a captured state: itself, or a smaller copy. None when there is no room for one,
        or the tree has one."""
        if self.checkpoints is self.states:
            return captured
        if self.tree.peek(key, captured.num_tokens).num_tokens == captured.num_tokens:
            return None
        record = self._room.take_checkpoint()
        if record is None:
            return None
        try:
            assert self.memory.store is not None
            self.memory.store.store(captured.slot, record)
        except BaseException:
            self.checkpoints.free([record])
            raise
        return captured._replace(slot=record)

    def _capture(self, lease: Lease, num_tokens: int, slot: int | None, kind: str) -> Checkpoint | None:
        if slot is None:
            return None
        checkpoint = Checkpoint(slot, num_tokens, kind, lease.priority, lease.turn)
        lease.captured.append(checkpoint)
        return checkpoint

    def _expire_pins(self) -> None:
        if self.pins:
            now = time.monotonic()
            for pin in [pin for pin in self.pins if pin.expires <= now]:
                self.unpin(pin)

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin. One that has been let go of already stays so."""
        self._refuse_other_threads()
        if pin in self.pins:
            self.pins.remove(pin)
            self._unlock(pin.page_lock, pin.state_lock)

    def _unlock(self, *locks: Lock | None) -> None:
        for lock in locks:
            if lock is not None:
                self.tree.unlock(lock)
