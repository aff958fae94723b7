"""The prefix cache: a tree, its pools, and the memory behind them.

How requests use it is in `hybrid.leasing`; here is how a cache is made, what can be pinned in it, and what it tells.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import torch

from hybrid.cache.allocator import PIECES_BESIDE, Mover
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import CacheStats, Pin
from hybrid.cache.leasing import Leasing
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.kernels.codec import stored_layout
from hybrid.key import Key
from hybrid.memory.arena import Arena, PieceLayout
from hybrid.memory.pool import EMPTY_STATE, IndexPool
from hybrid.memory.tensors import CacheTensors
from hybrid.spec import HybridSpec
from hybrid.units import Prices, format_bytes

MIN_STATE_SLOTS = 3
"""The empty prefix, the front of one request, and the checkpoint it reads."""


MOST_PINNED = 0.5
"""Pins may keep this part of the memory."""

PINNED_TOO_MUCH = (
    "pinning this would keep over half of the memory from everybody else; "
    "unpin something, or give the cache more memory"
)


def smallest_memory(num_pages: int, page_bytes: int, state_bytes: int, state_share: float | None) -> int:
    """Bytes that hold so many pages, and the states of one request: at a split between the two, or in one budget."""
    if state_share is None:
        layout = PieceLayout.of(page_bytes, state_bytes)
        return (-(-num_pages // layout.pages) + PIECES_BESIDE) * layout.num_bytes
    return math.ceil(max(num_pages * page_bytes / (1 - state_share), MIN_STATE_SLOTS * state_bytes / state_share)) + 1


class HybridCache(Leasing):
    """A prefix cache for models that keep pages of KV and states.

    One thread owns a cache: the first that opens a lease, until another calls `adopt`. Every call that changes
    something raises in any other thread, and has changed nothing. `stats()` may be called from any thread at any time:
    each of its figures held at some moment during the call.

    Args:
        config: page size, grid and eviction policy.
        pages: the pool of pages.
        states: the pool of state slots. Slot 0 is reserved for the empty prefix.
        checkpoints: the pool of stored checkpoints, when they are stored smaller than states.
        arena: what the pools share, when they do.
        tensors: the memory itself; None for the bookkeeping alone.
        prices: bytes of a page and of a checkpoint.
    """

    @classmethod
    def of_indices(cls, num_pages: int, num_states: int, config: CacheConfig | None = None) -> HybridCache:
        """A cache without tensors, for those who keep their own memory: so many pages, and so many state slots.

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
    def of_bytes(
        cls,
        memory: int,
        page_bytes: int,
        state_bytes: int,
        config: CacheConfig | None = None,
        record_bytes: int | None = None,
        mover: Mover | None = None,
    ) -> HybridCache:
        """A cache without tensors over one budget of bytes, for those who keep their own memory: `hybrid.arena` says
        which page and which state lie where.

        Args:
            memory: bytes for pages and states; the piece that holds the empty state comes on top.
            record_bytes: size of a stored checkpoint, when it is stored smaller than a state.
            mover: moves the contents of your memory when pages or states are moved together.

        Raises:
            MemoryBudgetError: the memory does not hold one page and the states of one request.
        """
        layout = PieceLayout.of(page_bytes, state_bytes, record_bytes or 0)
        needed = smallest_memory(1, page_bytes, state_bytes, None) - layout.num_bytes
        if memory < needed:
            raise MemoryBudgetError(f"of_bytes: memory={memory} does not suffice; one request needs {needed} bytes")
        memory += layout.num_bytes
        cache = cls._elastic(memory, page_bytes, state_bytes, config or CacheConfig(), record_bytes, None)
        cache._room.mover = mover
        return cache

    @classmethod
    def for_spec(cls, spec: HybridSpec, config: CacheConfig, device: torch.device, free: int) -> HybridCache:
        """A cache with its tensors, as large as `config` says.

        Args:
            free: bytes that the device can give.

        Raises:
            MemoryBudgetError: the memory does not hold one page and the states of one request.
        """
        memory = config.memory_bytes(free, device.type == "cuda")
        page_bytes, state_bytes = spec.page_bytes(config.page_size), spec.state_bytes
        if config.state_share is None:
            stored = None
            if config.state_dtype != "float32":
                tensors = [(tensor.name, tensor.shape, tensor.dtype) for tensor in spec.state]
                stored = stored_layout(tensors, config.state_dtype)
            layout = PieceLayout.of(page_bytes, state_bytes, stored.num_bytes if stored is not None else 0)
            cls._refuse_too_small(memory, page_bytes, state_bytes, config)
            made = CacheTensors.elastic(spec, config.page_size, memory // layout.num_bytes, layout, device, stored)
            record_bytes = stored.num_bytes if stored is not None else None
            return cls._elastic(memory, page_bytes, state_bytes, config, record_bytes, made)
        num_pages = int(memory * (1 - config.state_share)) // page_bytes
        num_states = (memory - num_pages * page_bytes) // state_bytes
        if num_states < MIN_STATE_SLOTS or num_pages < 1:
            cls._refuse_too_small(0, page_bytes, state_bytes, config)
        return cls.with_room(spec, config, device, num_pages, num_states)

    @classmethod
    def with_room(
        cls, spec: HybridSpec, config: CacheConfig, device: torch.device, num_pages: int, num_states: int
    ) -> HybridCache:
        """A cache with its tensors, for so many pages and state slots (the reserved one included), whatever
        `config.memory` and `config.state_share` say."""
        tensors = CacheTensors.fixed(spec, config.page_size, num_pages, num_states, device)
        pages, states = IndexPool(num_pages, 0, "page"), IndexPool(num_states, EMPTY_STATE + 1, "state slot")
        prices = Prices(spec.page_bytes(config.page_size), spec.state_bytes)
        cache = cls(config, pages, states, tensors=tensors, prices=prices)
        cache._unit_bytes = prices.page, prices.checkpoint
        return cache

    @classmethod
    def _elastic(
        cls,
        memory: int,
        page_bytes: int,
        state_bytes: int,
        config: CacheConfig,
        record_bytes: int | None,
        tensors: CacheTensors | None,
    ) -> HybridCache:
        layout = PieceLayout.of(page_bytes, state_bytes, record_bytes or 0)
        arena = Arena(memory // layout.num_bytes)
        states = arena.pool(layout.states, EMPTY_STATE + 1, "state slot")
        pages = arena.pool(layout.pages, 0, "page")
        checkpoints = arena.pool(layout.records, 0, "stored checkpoint") if record_bytes is not None else None
        share = layout.num_bytes // (layout.states if record_bytes is None else layout.records)
        cache = cls(config, pages, states, checkpoints, arena, tensors, Prices(page_bytes, share))
        cache._unit_bytes = page_bytes, state_bytes
        return cache

    @staticmethod
    def _refuse_too_small(memory: int, page_bytes: int, state_bytes: int, config: CacheConfig) -> None:
        needed = smallest_memory(1, page_bytes, state_bytes, config.state_share)
        if memory < needed:
            raise MemoryBudgetError(
                f"CacheConfig: memory={config.memory!r} does not suffice; one request needs at least "
                f"{format_bytes(needed)} ({MIN_STATE_SLOTS} states of {format_bytes(state_bytes)}, a page of "
                f"{format_bytes(page_bytes)}): CacheConfig(memory={needed})"
            )

    @property
    def kv(self) -> torch.Tensor:
        """The pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; only where the cache has tensors."""
        assert self._tensors is not None
        return self._tensors.kv

    @property
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The state slots, `[num_slots, ...]` by name; only where the cache has tensors."""
        assert self._tensors is not None
        return self._tensors.state

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """Bytes of a page and of a state; zeros where the cache does not know them."""
        return self._unit_bytes

    @property
    def largest_request(self) -> int:
        """Pages that a request could have if it were alone."""
        return self._room.largest_request()

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
