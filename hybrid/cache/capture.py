"""Capturing checkpoints: where a request may, what is admitted, and which of its own states it donates."""

from __future__ import annotations

from hybrid.cache.allocator import Allocator
from hybrid.cache.lease import Lease
from hybrid.cache.tiers import Tiers
from hybrid.checks import MAX_INT, integer, shown
from hybrid.errors import ArgumentError
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Checkpoint, Kind
from hybrid.tree.tree import Tree

SPARE_SHARE = 0.25
"""Spare checkpoints leave this part of the memory free."""


class Capturer:
    """Adds checkpoints to `Lease.captured`, each with a state slot that belongs to the lease until it is committed.

    Args:
        tree: has checkpoints, and asks the policy whether one more is admitted.
        memory: the pools.
        allocator: allocates the slots.
        tiers: may keep what the device has no place for; None: there are none.
    """

    def __init__(self, tree: Tree, memory: CacheMemory, allocator: Allocator, tiers: Tiers | None = None) -> None:
        self._tree = tree
        self._tiers = tiers
        self._memory = memory
        self._allocator = allocator

    def capture(self, lease: Lease, num_tokens: int, kind: Kind) -> Checkpoint | None:
        """See `HybridCache.capture`."""
        num_tokens = self._position(lease, num_tokens)
        kind = kind if type(kind) is Kind else self._kind(kind)
        if self._is_useless(lease, num_tokens):
            return None
        if not self._memory.checkpoints.num_free and not self._is_admitted(lease, num_tokens, kind):
            return None
        return self._allocate(lease, num_tokens, kind)

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        """See `HybridCache.capture_spare`."""
        num_tokens = self._position(lease, num_tokens)
        if self._memory.free_state_share <= SPARE_SHARE or self._is_useless(lease, num_tokens):
            return None
        return self._allocate(lease, num_tokens, Kind.INTERVAL)

    def donate(self, lease: Lease, limit: int) -> None:
        """See `HybridCache.donate_states`."""
        limit = integer("donate_states: limit", limit, -MAX_INT)
        own = lease.front != EMPTY_STATE and lease.read_slot == lease.front
        if own and self._can_be_donated(lease, lease.front_tokens, limit):
            lease.captured.append(
                Checkpoint(lease.front, lease.front_tokens, Kind.TURN_END, lease.priority, lease.turn)
            )
            lease.front = EMPTY_STATE
        elif lease.back is not None and self._can_be_donated(lease, lease.back_tokens, limit):
            lease.captured.append(Checkpoint(lease.back, lease.back_tokens, Kind.TURN_END, lease.priority, lease.turn))
            lease.back = None

    def _allocate(self, lease: Lease, num_tokens: int, kind: Kind) -> Checkpoint | None:
        slot = self._allocator.allocate_state()
        if slot is None:
            return None
        checkpoint = Checkpoint(slot, num_tokens, kind, lease.priority, lease.turn)
        lease.captured.append(checkpoint)
        return checkpoint

    @staticmethod
    def _kind(name: str) -> Kind:
        if name in list(Kind):
            return Kind(name)
        raise ArgumentError(f"capture: kind must be one of {', '.join(Kind)}; got {shown(name)}")

    def _position(self, lease: Lease, num_tokens: int) -> int:
        """Check where a state is to be captured."""
        num_tokens = integer("capture: num_tokens", num_tokens, 0)
        if num_tokens % self._tree.grid:
            raise ArgumentError(f"capture: {num_tokens} is not a multiple of the grid of {self._tree.grid}")
        if num_tokens <= lease.front_tokens:
            raise ArgumentError(f"capture: the state after {num_tokens} tokens; the front is at {lease.front_tokens}")
        if any(checkpoint.num_tokens == num_tokens for checkpoint in lease.captured):
            raise ArgumentError(f"capture: the state after {num_tokens} tokens is captured already")
        return num_tokens

    def _is_useless(self, lease: Lease, num_tokens: int) -> bool:
        """Whether no match could use a checkpoint there, or the tree has one."""
        if num_tokens > len(lease.key):
            return False
        if lease.key.whole(num_tokens, 1) != num_tokens:
            return True
        node = lease.page_lock.node if lease.page_lock is not None else None
        if node is not None and node.end < num_tokens and not node.children:
            return False  # the usual case: the tree has nothing beyond the lease's pages
        return self._tree.peek(lease.key, num_tokens).num_tokens == num_tokens

    def _is_admitted(self, lease: Lease, num_tokens: int, kind: Kind) -> bool:
        """Ask the policy. A checkpoint that is not admitted is remembered all the same, so that the policy learns what
        it missed."""
        usage = lease.lost.setdefault(num_tokens, self._tree.new_usage(kind, lease.turn, lease.key.namespace))
        usage.raise_priority(lease.priority)
        above = [checkpoint.num_tokens for checkpoint in lease.captured if checkpoint.num_tokens < num_tokens]
        node = lease.page_lock.node if lease.page_lock is not None else None
        if node is not None and node.slot is None:
            node = node.checkpoint_above()
        while node is not None and node.end >= num_tokens:
            node = node.checkpoint_above()
        above.append(node.end if node is not None else 0)
        if self._tree.admits(usage, num_tokens, max(above), kind == Kind.TURN_END, self._memory.arena is not None):
            return True
        return self._tiers is not None and self._tiers.departures.would_copy(usage, num_tokens - max(above))

    def _can_be_donated(self, lease: Lease, num_tokens: int, limit: int) -> bool:
        on_grid = 0 < num_tokens <= limit and num_tokens % self._tree.grid == 0
        captured = any(checkpoint.num_tokens == num_tokens for checkpoint in lease.captured)
        return on_grid and not captured and lease.key.whole(num_tokens, 1) == num_tokens
