"""The cache: the one place where pages and state slots change hands.

Every page and every state slot is, at every moment, free, private to one lease, or owned by one node of the tree. A
*lease* is what one running request holds. Its life:

    open      match; lock pages to the page hit and the checkpoint at the usable hit; take a front slot and pages
    reserve   take private pages for the tokens to come
    capture   take a slot for a checkpoint that the next forward pass writes
    advance   a pass is done: the front is valid after so many tokens; the matched checkpoint is unlocked after the
    first commit    hand finished pages and captured checkpoints to the tree; duplicates are freed, the block table
    points at the tree's close     give everything back

An allocation that fails changes nothing: the call returns None or False. One thread owns a cache; `stats()` may be
called from any.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import torch

from hybrid.config import CacheConfig, format_bytes
from hybrid.errors import MemoryBudgetError, OwnershipError
from hybrid.eviction import policy_named
from hybrid.explain import Explanation, cache_off, explain
from hybrid.key import Key
from hybrid.lease import CacheStats, Lease
from hybrid.node import Checkpoint, Lock, Match, Released
from hybrid.pages import PagePool
from hybrid.pool import EMPTY_STATE, IndexPool
from hybrid.spec import HybridSpec
from hybrid.states import StatePool
from hybrid.tree import Tree

MIN_STATE_SLOTS = 3
"""The empty prefix, the front of one request, and the checkpoint it reads."""


def smallest_memory(num_pages: int, page_bytes: int, state_bytes: int, state_share: float) -> int:
    """Bytes that hold so many pages, and the states of one request, at a split between the two."""
    return math.ceil(max(num_pages * page_bytes / (1 - state_share), MIN_STATE_SLOTS * state_bytes / state_share)) + 1


class HybridCache:
    """A prefix cache for models that keep pages of KV and states.

    Args:
        config: page size, grid and eviction policy.
        pages: the pool of pages; an `IndexPool` for the bookkeeping alone, a `PagePool` with tensors.
        states: the pool of state slots, likewise. Slot 0 is reserved for the empty prefix.
    """

    def __init__(self, config: CacheConfig, pages: IndexPool, states: IndexPool) -> None:
        self.config = config
        self.tree = Tree(config.page_size, config.grid, policy_named(config.eviction))
        self.pages = pages
        self.states = states
        self.leases: set[Lease] = set()
        self._stats = CacheStats()

    @classmethod
    def of_indices(cls, num_pages: int, num_states: int, config: CacheConfig | None = None) -> HybridCache:
        """A cache without tensors, for those who keep their own memory.

        Args:
            num_states: state slots to hand out, at least 2 (a front, and the checkpoint it reads); numbered from 1.

        Raises:
            MemoryBudgetError: fewer than 2 state slots, or no page.
        """
        if num_states < MIN_STATE_SLOTS - 1 or num_pages < 1:
            raise MemoryBudgetError(f"one request needs a page and 2 state slots; got {num_pages} and {num_states}")
        return cls(
            config or CacheConfig(),
            IndexPool(num_pages, 0, "page"),
            IndexPool(num_states + 1, EMPTY_STATE + 1, "state slot"),
        )

    @classmethod
    def for_spec(cls, spec: HybridSpec, config: CacheConfig, device: torch.device, free: int) -> HybridCache:
        """A cache with its tensors, as large as `config` says.

        Args:
            free: bytes that the device can give.

        Raises:
            MemoryBudgetError: the memory does not hold one page and the states of one request.
        """
        memory = config.memory_bytes(free)
        page_bytes, state_bytes = spec.page_bytes(config.page_size), spec.state_bytes
        num_pages = int(memory * (1 - config.state_share)) // page_bytes
        num_states = (memory - num_pages * page_bytes) // state_bytes
        if num_states < MIN_STATE_SLOTS or num_pages < 1:
            needed = smallest_memory(1, page_bytes, state_bytes, config.state_share)
            raise MemoryBudgetError(
                f"CacheConfig: memory={config.memory!r} is {format_bytes(memory)}; one request needs at least "
                f"{format_bytes(needed)} ({MIN_STATE_SLOTS} states of {format_bytes(state_bytes)}, a page of "
                f"{format_bytes(page_bytes)}): CacheConfig(memory={needed})"
            )
        return cls.with_room(spec, config, device, num_pages, num_states)

    @classmethod
    def with_room(
        cls, spec: HybridSpec, config: CacheConfig, device: torch.device, num_pages: int, num_states: int
    ) -> HybridCache:
        """A cache with its tensors, for so many pages and state slots (the reserved one included), whatever
        `config.memory` says."""
        cache = cls(config, PagePool(spec, num_pages, config.page_size, device), StatePool(spec, num_states, device))
        cache._stats.page_bytes, cache._stats.state_bytes = spec.page_bytes(config.page_size), spec.state_bytes
        return cache

    @property
    def kv(self) -> torch.Tensor:
        """The pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; only where the cache has tensors."""
        assert isinstance(self.pages, PagePool)
        return self.pages.kv

    @property
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The state slots, `[num_slots, ...]` by name; only where the cache has tensors."""
        assert isinstance(self.states, StatePool)
        return self.states.tensors

    # The life of a lease

    def open(self, key: Key, limit: int, num_tokens: int) -> Lease | None:
        """Start a request that may use at most `limit` tokens of what is known. None when the memory for it cannot be
        had.

        Args:
            limit: at most `len(key) - 1`, so that a token is left to compute.
            num_tokens: tokens to have pages for at once.
        """
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
        )
        self.leases.add(lease)
        opened = False
        try:
            if found.deepest is not None:
                lease.page_lock = self.tree.lock_pages(found.deepest)
            if found.checkpoint is not None:
                assert found.checkpoint.slot is not None
                lease.state_lock, lease.read_slot = self.tree.lock_state(found.checkpoint), found.checkpoint.slot
            lease.front = self._take_state() or EMPTY_STATE
            opened = lease.front != EMPTY_STATE and self.reserve(lease, num_tokens)
        finally:
            if not opened:
                self.close(lease)
        if not opened:
            return None
        self.tree.touch(found)
        return lease

    def record(self, explanation: Explanation) -> None:
        """Count a request and its hit in the statistics: once per request, however often its lease is opened."""
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
            pages = self._take_pages(missing)
            if pages is None:
                return False
            lease.block_table.extend(pages)
        return True

    def capture(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        """Take a slot for the state after `num_tokens` tokens, which the pass under way writes. None when none can be
        had."""
        self._refuse_closed(lease)
        return self._capture(lease, num_tokens, self._take_state(), spare=False)

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        """As `capture`, from memory that nobody else wants: nothing is evicted, and a quarter of the slots stays
        free."""
        self._refuse_closed(lease)
        if 4 * self.states.num_free <= self.states.capacity:
            return None
        return self._capture(lease, num_tokens, self._take_state(), spare=True)

    def take_back(self, lease: Lease) -> bool:
        """Make sure that the lease has the second slot of its ping-pong pair. False when none can be had."""
        self._refuse_closed(lease)
        if lease.back is None:
            lease.back = self._take_state()
        return lease.back is not None

    def swap(self, lease: Lease) -> None:
        """The pass read the front and wrote the back: the back is the front now, and the old state stays behind it."""
        assert lease.back is not None
        lease.front, lease.back, lease.back_tokens = lease.back, lease.front, lease.front_tokens

    def advance(self, lease: Lease, num_tokens: int) -> None:
        """A pass is done: the front holds the state after `num_tokens` tokens. The matched checkpoint is not needed any
        more."""
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
        if num_tokens % self.config.page_size or num_tokens > len(lease.block_table) * self.config.page_size:
            raise OwnershipError(
                f"commit: {num_tokens} tokens, with {len(lease.block_table)} pages of {self.config.page_size}"
            )
        num_shared = min(lease.num_shared, num_tokens // self.config.page_size)
        found = self.tree.peek(key, num_shared * self.config.page_size)
        if self.tree.pages(found.deepest, found.num_page_tokens) != lease.block_table[:num_shared]:
            raise OwnershipError("commit: the key does not begin as the one under which the lease found its pages")
        for checkpoint in sorted(lease.captured, key=lambda c: c.num_tokens):
            if checkpoint.num_tokens <= num_tokens:
                self._insert(lease, key, checkpoint.num_tokens, checkpoint)
        if num_tokens > lease.num_shared * self.config.page_size:
            self._insert(lease, key, num_tokens, None)

    def donate_states(self, lease: Lease, limit: int) -> None:
        """Offer the deepest of the lease's own states that lies on the grid and not beyond `limit`, for the next
        commit.

        It is the end of a request's life: the front or the back changes hands without a copy.
        """
        grid = self.config.grid
        own = lease.front != EMPTY_STATE and lease.state_lock is None
        if own and 0 < lease.front_tokens <= limit and lease.front_tokens % grid == 0:
            lease.captured.append(Checkpoint(lease.front, lease.front_tokens))
            lease.front = EMPTY_STATE
        elif lease.back is not None and 0 < lease.back_tokens <= limit and lease.back_tokens % grid == 0:
            lease.captured.append(Checkpoint(lease.back, lease.back_tokens))
            lease.back = None

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

    # The whole

    def clear(self) -> None:
        """Forget everything that no running request needs."""
        self._let_go(self.tree.evict_all())

    def stats(self) -> CacheStats:
        """What the cache did and holds. May be called from any thread."""
        now = replace(self._stats)
        now.pages_total, now.pages_free, now.pages_cached = (
            self.pages.capacity,
            self.pages.num_free,
            self.tree.num_pages,
        )
        now.states_total, now.states_free, now.checkpoints = (
            self.states.capacity,
            self.states.num_free,
            self.tree.num_checkpoints,
        )
        now.pages_private = now.pages_total - now.pages_free - now.pages_cached
        now.states_private = now.states_total - now.states_free - now.checkpoints
        return now

    def audit(self) -> None:
        """Prove that every page and every slot is in exactly one place, and that the tree holds together.

        Raises:
            AuditError: it is not so; the message names what is wrong.
        """
        from hybrid.audit import audit  # the audit looks at a cache from outside

        audit(self)

    def _refuse_closed(self, lease: Lease) -> None:
        if lease not in self.leases:
            raise OwnershipError("this lease was closed before, or belongs to another cache")

    def _explain(self, key: Key, limit: int, found: Match) -> Explanation:
        return explain(self.tree, key, limit, found)

    def _insert(self, lease: Lease, key: Key, num_tokens: int, checkpoint: Checkpoint | None) -> None:
        page_size = self.config.page_size
        inserted = self.tree.insert(key, num_tokens, lease.block_table[: num_tokens // page_size], checkpoint)
        if checkpoint is not None:
            lease.captured.remove(checkpoint)
            if not inserted.adopted:
                self.states.free([checkpoint.slot])
        num_existing = inserted.num_existing // page_size
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

    def _capture(self, lease: Lease, num_tokens: int, slot: int | None, *, spare: bool) -> Checkpoint | None:
        if slot is None:
            return None
        checkpoint = Checkpoint(slot, num_tokens, spare)
        lease.captured.append(checkpoint)
        return checkpoint

    def _take_pages(self, count: int) -> list[int] | None:
        missing = count - self.pages.num_free
        if missing > 0:
            locks: list[Lock] = [lease.page_lock for lease in self.leases if lease.page_lock is not None]
            if missing > self.tree.num_pages - self.tree.num_locked_pages(locks):
                return None  # it would not suffice: spare the cache
            self._let_go(self.tree.evict_pages(missing))
        return self.pages.allocate(count)

    def _take_state(self) -> int | None:
        if not self.states.num_free:
            self._let_go(self.tree.evict_checkpoints(1))
        slots = self.states.allocate(1)
        return slots[0] if slots else None

    def _let_go(self, released: Released) -> None:
        self.pages.free(released.pages)
        self.states.free(released.slots)
        self._stats.evicted_pages += len(released.pages)
        self._stats.evicted_checkpoints += len(released.slots)

    def _unlock(self, *locks: Lock | None) -> None:
        for lock in locks:
            if lock is not None:
                self.tree.unlock(lock)


class PassThroughCache(HybridCache):
    """A cache that keeps nothing: every request computes its whole prompt. Memory is managed all the same."""

    def capture(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        return None

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        return None

    def take_back(self, lease: Lease) -> bool:
        return False

    def commit(self, lease: Lease, key: Key, num_tokens: int) -> None:
        return None

    def donate_states(self, lease: Lease, limit: int) -> None:
        return None

    def _explain(self, key: Key, limit: int, found: Match) -> Explanation:
        return cache_off(key)
