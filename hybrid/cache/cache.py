"""The prefix cache: a tree, its pools, and the memory behind them.

How requests use it is in `hybrid.leasing`; here is how a cache is made, what can be pinned in it, and what it tells.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import torch

from hybrid.cache.lease import CacheStats, Pin
from hybrid.cache.leasing import Leasing
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.key import Key

MOST_PINNED = 0.5
"""Pins may keep this part of the memory."""

PINNED_TOO_MUCH = (
    "pinning this would keep over half of the memory from everybody else; "
    "unpin something, or give the cache more memory"
)


class HybridCache(Leasing):
    """A prefix cache for models that keep pages of KV and states.

    One thread owns a cache: the first that opens a lease, until another calls `adopt`. Every call that changes
    something raises in any other thread, and has changed nothing. `stats()` may be called from any thread at any time:
    each of its figures held at some moment during the call.

    Args:
        memory: what the cache manages; see `CacheMemory`.
        config: page size, grid, eviction policy and placement; the sizes in it are for those who make a memory of it.
    """

    @property
    def kv(self) -> torch.Tensor:
        """The pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; only where the cache has tensors."""
        assert self.memory.tensors is not None
        return self.memory.tensors.kv

    @property
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The state slots, `[num_slots, ...]` by name; only where the cache has tensors."""
        assert self.memory.tensors is not None
        return self.memory.tensors.state

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """Bytes of a page and of a state; zeros where the cache does not know them."""
        sizes = self.memory.sizes
        return (sizes.page, sizes.state) if sizes is not None else (0, 0)

    @property
    def largest_request(self) -> int:
        """Pages that a request could have if it were alone."""
        return self.memory.largest_request

    def adopt(self) -> None:
        """The calling thread owns the cache from now on. The one that did must be done with it."""
        self._owner = threading.get_ident()

    # Pins

    def pin(self, key: Key, ttl: float = math.inf) -> Pin | None:
        """Keep what is usable of a key from eviction. None when nothing is.

        Args:
            ttl: seconds until it is let go by itself.

        Raises:
            ArgumentError: `ttl` is no time.
            MemoryBudgetError: more than half of the memory would be pinned.
        """
        self._refuse_other_threads()
        if not ttl > 0:
            raise ArgumentError(f"pin: ttl must be a positive number of seconds, got {ttl!r}")
        self._expire_pins()
        node = self.tree.peek(key, len(key)).checkpoint
        if node is None:
            return None
        pin = Pin(node.end, time.monotonic() + ttl, self.tree.lock_pages(node), self.tree.lock_state(node))
        self.pins.append(pin)
        if self._room.pinned_share() > MOST_PINNED:
            self.unpin(pin)
            raise MemoryBudgetError(PINNED_TOO_MUCH)
        return pin

    def extend_pin(self, pin: Pin, key: Key) -> None:
        """Have a pin keep what is usable of a key by now. One that has been let go of stays so.

        Raises:
            MemoryBudgetError: more than half of the memory would be pinned. The pin is as it was.
        """
        self._refuse_other_threads()
        node = self.tree.peek(key, len(key)).checkpoint
        if pin not in self.pins or node is None:
            return
        old = pin.num_tokens, pin.page_lock, pin.state_lock
        pin.num_tokens, pin.page_lock, pin.state_lock = node.end, self.tree.lock_pages(node), self.tree.lock_state(node)
        if self._room.pinned_share() > MOST_PINNED:
            self._unlock(pin.page_lock, pin.state_lock)
            pin.num_tokens, pin.page_lock, pin.state_lock = old
            raise MemoryBudgetError(PINNED_TOO_MUCH)
        self._unlock(old[1], old[2])

    def give_up_a_pin(self) -> bool:
        """Let go of the pin that would end first, because nothing else could run. False when there is none."""
        pin = min(self.pins, key=lambda pin: pin.expires, default=None)
        if pin is not None:
            self.unpin(pin)
        return pin is not None

    # The whole

    def clear(self) -> None:
        """Forget everything that no running request needs and nobody has pinned."""
        self._refuse_other_threads()
        self._room.evict(self.tree.evict_all)

    def stats(self) -> CacheStats:
        """What the cache did and holds. May be called from any thread."""
        room, tree = self._room, self.tree
        now = replace(self._stats)
        now.evicted_pages, now.evicted_checkpoints = room.evicted_pages, room.evicted_checkpoints
        now.moved_pages = room.moved
        now.pages_total, now.pages_free, now.pages_cached = self.pages.capacity, self.pages.num_free, tree.num_pages
        now.states_total, now.states_free, now.checkpoints = (
            self.checkpoints.capacity,
            self.checkpoints.num_free,
            tree.num_checkpoints,
        )
        now.pages_private, now.states_private = room.private()
        now.pins, now.policy_failure = len(self.pins), tree.policy_failure
        return now

    def audit(self) -> None:
        """Prove that every page and every slot is in exactly one place, and that the tree holds together.

        Raises:
            AuditError: it is not so; the message names what is wrong.
        """
        from hybrid.cache.audit import audit  # the audit looks at a cache from outside

        audit(self)
