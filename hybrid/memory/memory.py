"""The memory of a cache as one noun: its pools, the tensors behind them, the sizes of units, and who moves contents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.checks import integer
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.kernels.codec import stored_layout
from hybrid.memory.arena import Arena, ArenaPool, PieceLayout
from hybrid.memory.contents import CAN_STORE, GivenContents, InFlight, Mover, UnitContents, has
from hybrid.memory.copies import Contents, Downloads, Uploads
from hybrid.memory.digests import Digests
from hybrid.memory.pool import EMPTY_STATE, IndexPool
from hybrid.memory.tensors import CacheTensors
from hybrid.spec import HybridSpec
from hybrid.units import Prices, format_bytes

Pool = IndexPool | ArenaPool

MIN_STATE_SLOTS = 3
"""The empty prefix, the front of one request, and the checkpoint that it reads."""

EXTRA_PIECES = 3
"""Pieces that a request needs in addition to its pages: for the empty state, its own state, and its checkpoint."""


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of the units of a memory.

    Attributes:
        page: of a page.
        state: of a state slot.
        checkpoint: what a checkpoint occupies: its share of a piece, or a state slot.
    """

    page: int
    state: int
    checkpoint: int


def smallest_memory(num_pages: int, page_bytes: int, state_bytes: int, state_share: float | None) -> int:
    """Compute the bytes that suffice for `num_pages` pages and the states of one request.

    Args:
        state_share: part of the memory that holds states; None: pages and states share one budget.
    """
    if state_share is None:
        layout = PieceLayout.of(page_bytes, state_bytes)
        return (-(-num_pages // layout.pages) + EXTRA_PIECES) * layout.num_bytes
    return math.ceil(max(num_pages * page_bytes / (1 - state_share), MIN_STATE_SLOTS * state_bytes / state_share)) + 1


class CacheMemory:
    """The memory that a `HybridCache` manages.

    Make one with `of_indices` or `of_bytes` (you keep the contents), or with `for_spec` or `fixed` (with tensors).

    Args:
        pages, states: the pools. State slot 0 is reserved for the empty prefix.
        checkpoints: the pool of stored checkpoints; None: checkpoints are state slots.
        arena: the pieces that the pools share; None: pools of fixed sizes.
        sizes: bytes of the units; None: unknown, and policies compare pages and states by default prices.
        tensors: the contents, where this library keeps them.
        mover: moves contents that are kept elsewhere; None: `tensors`, if there are any.
        store: stores checkpoints in `checkpoints`; required with it. None: `tensors`, if there are any. It has
            `checkpoint_bytes`, and `store`, `restore` and `move_stored` of `hybrid.memory.contents.UnitContents`.

    Raises:
        ArgumentError: there is a pool of stored checkpoints, and nothing that stores them.

    Attributes:
        contents: what is in the units.
        uploads: contents on their way into the memory.
        downloads: contents on their way from it to the host.
        in_flight: what other threads compute on it.
    """

    def __init__(
        self,
        pages: Pool,
        states: Pool,
        checkpoints: Pool | None = None,
        arena: Arena | None = None,
        sizes: UnitSizes | None = None,
        *,
        tensors: CacheTensors | None = None,
        mover: Mover | None = None,
        store: Any = None,
    ) -> None:
        self.pages: Pool = pages
        self.states: Pool = states
        self.checkpoints: Pool = checkpoints if checkpoints is not None else states
        self.arena: Arena | None = arena
        self.sizes: UnitSizes | None = sizes
        self.tensors: CacheTensors | None = tensors
        if checkpoints is not None:
            store = store if store is not None else tensors
            _check_store("CacheMemory: checkpoints are stored apart from states, which needs a store with", store)
        keeper = mover if mover is not None else tensors
        if keeper is None and store is None:
            self.contents: UnitContents = UnitContents()
        elif isinstance(keeper, UnitContents) and (store is None or store is keeper):
            self.contents = keeper
        else:
            self.contents = GivenContents(keeper, store)
        self.uploads: Uploads = self.contents.uploads
        self.downloads: Downloads = self.contents.downloads
        self.in_flight: InFlight = self.contents.in_flight

    @classmethod
    def of_indices(cls, num_pages: int, num_states: int) -> CacheMemory:
        """Fixed numbers of pages and state slots, without contents.

        Args:
            num_pages: pages, numbered from 0.
            num_states: state slots to hand out, numbered from 1; at least 2 (a front, and the checkpoint it reads).

        Raises:
            MemoryBudgetError: fewer than 2 state slots, or no page.
            ArgumentError: a number is not an integer.
        """
        num_pages = integer("of_indices: num_pages", num_pages, 0)
        num_states = integer("of_indices: num_states", num_states, 0)
        if num_states < MIN_STATE_SLOTS - 1 or num_pages < 1:
            raise MemoryBudgetError(f"one request needs a page and 2 state slots; got {num_pages} and {num_states}")
        return cls(*_fixed_pools(num_pages, num_states + 1))

    @classmethod
    def of_bytes(
        cls,
        memory: int,
        page_bytes: int,
        state_bytes: int,
        *,
        mover: Mover | None = None,
        store: Any = None,
    ) -> CacheMemory:
        """One budget of bytes for pages and states, without contents. `hybrid.memory.arena` defines which bytes a page
        and a state slot occupy.

        Args:
            memory: bytes for pages and states; the piece that holds the empty state comes on top.
            page_bytes, state_bytes: bytes of a page and of a state.
            mover: moves your contents when pages or states are moved together; None: there is nothing to move.
            store: stores checkpoints smaller than states: it has `checkpoint_bytes`, and `store`, `restore` and
                `move_stored` of `hybrid.memory.contents.UnitContents`. None: checkpoints are state slots.

        Raises:
            MemoryBudgetError: the memory does not hold one page and the states of one request.
            ArgumentError: `store` lacks something, or a size is not a positive integer.
        """
        memory = integer("of_bytes: memory, in bytes,", memory, 1)
        page_bytes = integer("of_bytes: page_bytes", page_bytes, 1)
        state_bytes = integer("of_bytes: state_bytes", state_bytes, 1)
        if store is not None:
            _check_store("of_bytes: store needs", store)
        layout = PieceLayout.of(page_bytes, state_bytes, store.checkpoint_bytes if store is not None else 0)
        needed = smallest_memory(1, page_bytes, state_bytes, None) - layout.num_bytes
        if memory < needed:
            raise MemoryBudgetError(f"of_bytes: memory={memory} does not suffice; one request needs {needed} bytes")
        arena, pages, states, checkpoints = _elastic_pools(memory // layout.num_bytes + 1, layout)
        sizes = _elastic_sizes(layout, page_bytes, state_bytes)
        return cls(pages, states, checkpoints, arena, sizes, mover=mover, store=store)

    @classmethod
    def for_spec(
        cls,
        spec: HybridSpec,
        memory: int,
        device: torch.device,
        *,
        page_size: int,
        state_share: float | None = None,
        state_dtype: str = "float32",
    ) -> CacheMemory:
        """Make the memory of a model, with its tensors.

        Args:
            memory: bytes for pages and states together.
            device: where the tensors are allocated.
            page_size: tokens per page.
            state_share: part of the memory that holds states; None: pages and states share one budget.
            state_dtype: how checkpoints are stored: "float32" as they are, "bfloat16" or "int8" smaller (needs
                `state_share=None`).

        Raises:
            MemoryBudgetError: the memory does not hold one page and the states of one request.
        """
        page_bytes, state_bytes = spec.page_bytes(page_size), spec.state_bytes
        if state_share is not None:
            num_pages = int(memory * (1 - state_share)) // page_bytes
            num_states = (memory - num_pages * page_bytes) // state_bytes
            if num_states < MIN_STATE_SLOTS or num_pages < 1:
                raise _too_small(memory, page_bytes, state_bytes, state_share)
            return cls.fixed(spec, page_size, num_pages, num_states, device)
        if memory < smallest_memory(1, page_bytes, state_bytes, None):
            raise _too_small(memory, page_bytes, state_bytes, None)
        stored = None
        if state_dtype != "float32":
            stored = stored_layout([(tensor.name, tensor.shape, tensor.dtype) for tensor in spec.state], state_dtype)
        layout = PieceLayout.of(page_bytes, state_bytes, stored.num_bytes if stored is not None else 0)
        num_pieces = memory // layout.num_bytes
        tensors = CacheTensors.elastic(spec, page_size, num_pieces, layout, device, stored)
        arena, pages, states, checkpoints = _elastic_pools(num_pieces, layout)
        sizes = _elastic_sizes(layout, page_bytes, state_bytes)
        return cls(pages, states, checkpoints, arena, sizes, tensors=tensors)

    @classmethod
    def fixed(
        cls, spec: HybridSpec, page_size: int, num_pages: int, num_states: int, device: torch.device
    ) -> CacheMemory:
        """Make the memory of a model, with its tensors, for fixed numbers of pages and state slots.

        Args:
            num_states: state slots, the reserved one included.
        """
        sizes = UnitSizes(spec.page_bytes(page_size), spec.state_bytes, spec.state_bytes)
        tensors = CacheTensors.fixed(spec, page_size, num_pages, num_states, device)
        return cls(*_fixed_pools(num_pages, num_states), sizes=sizes, tensors=tensors)

    def release(self) -> None:
        """Free the tensors. The pools stay as they are, and nothing can be computed on this memory any more."""
        self.in_flight.wait_for_pass()
        self.uploads.wait_for_all()
        self.tensors, self.contents = None, UnitContents()

    def reset(self) -> None:
        """Free everything, whatever was in use. Contents stay until they are overwritten."""
        self.uploads.wait_for_all()
        if self.arena is not None:
            self.arena.reset()
        else:
            self.pages.reset()
            self.states.reset()

    def are_finite(self, pages: Iterable[Contents], checkpoint: Contents | None) -> bool:
        """Tell whether contents that are to be written hold no NaN and no infinity; where they cannot be separated from
        others they are believed, and so are those that are on their way to the host, which does not wait for them."""
        has_arrived = self.downloads.has_arrived
        is_there = checkpoint is not None and has_arrived(checkpoint)
        return self.contents.are_finite(filter(has_arrived, pages), checkpoint if is_there else None)

    @property
    def settled(self) -> CacheTensors:
        """The tensors, of a memory that has them: no other thread computes on them, and the device's next work waits
        for contents that are on their way."""
        assert self.tensors is not None
        self.in_flight.wait_for_pass()
        self.uploads.wait_for_all()
        return self.tensors

    @property
    def stores_smaller(self) -> bool:
        """Tell whether checkpoints are stored apart from states, and smaller."""
        return self.checkpoints is not self.states

    def digests(self) -> Digests:
        """Make an empty list of digests of the contents.

        Raises:
            ArgumentError: there are no contents that can be read.
        """
        if not self.contents.can_read:
            raise ArgumentError(
                "CacheConfig: verify_contents needs a memory with tensors, or with a mover that has read_page and "
                "read_checkpoint too"
            )
        return Digests(self.contents)

    @property
    def prices(self) -> Prices:
        """The prices that policies compare: bytes of a page and of a checkpoint, or the default ratio of the two; and
        those of the memory, as far as it holds what is cached."""
        sizes = self.sizes or Prices()
        page, checkpoint = sizes.page, sizes.checkpoint
        states = 0 if self.arena is not None else self.checkpoints.capacity * checkpoint
        return Prices(page, checkpoint, self.pages.capacity * page + states)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes for pages and states together, and how many of them are in no use; zeros where sizes are unknown."""
        if self.sizes is None:
            return 0, 0
        if self.arena is None:
            pages, states = self.pages, self.states
            total = pages.size * self.sizes.page + states.size * self.sizes.state
            return total, pages.num_free * self.sizes.page + states.num_free * self.sizes.state
        assert isinstance(self.pages, ArenaPool)
        piece = self.pages.per_piece * self.sizes.page
        loose = sum(pool.num_loose * (piece // pool.per_piece) for pool in self.arena.pools)
        return self.arena.num_pieces * piece, self.arena.num_free * piece + loose

    @property
    def largest_request(self) -> int:
        """Pages that a request could have if it were alone."""
        if self.arena is None:
            return self.pages.capacity
        assert isinstance(self.pages, ArenaPool)
        return (self.arena.num_pieces - EXTRA_PIECES) * self.pages.per_piece

    @property
    def free_state_share(self) -> float:
        """The part of the memory for states that is free."""
        if self.arena is not None:
            return self.arena.num_free / self.arena.num_pieces
        return self.states.num_free / self.states.capacity


def _check_store(what: str, store: object) -> None:
    if not isinstance(store, UnitContents) and not has(store, ("checkpoint_bytes", *CAN_STORE)):
        raise ArgumentError(f"{what} checkpoint_bytes, store, restore and move_stored; got {store!r}")


def _fixed_pools(num_pages: int, num_states: int) -> tuple[IndexPool, IndexPool]:
    return IndexPool(num_pages, 0, "page"), IndexPool(num_states, EMPTY_STATE + 1, "state slot")


def _elastic_pools(num_pieces: int, layout: PieceLayout) -> tuple[Arena, ArenaPool, ArenaPool, ArenaPool | None]:
    """Make the arena, its pages, its states, and its stored checkpoints if the layout has any."""
    arena = Arena(num_pieces)
    states = arena.pool(layout.states, EMPTY_STATE + 1, "state slot")
    pages = arena.pool(layout.pages, 0, "page")
    checkpoints = arena.pool(layout.stored, 0, "stored checkpoint") if layout.stored else None
    return arena, pages, states, checkpoints


def _elastic_sizes(layout: PieceLayout, page_bytes: int, state_bytes: int) -> UnitSizes:
    return UnitSizes(page_bytes, state_bytes, layout.num_bytes // (layout.stored or layout.states))


def _too_small(memory: int, page_bytes: int, state_bytes: int, state_share: float | None) -> MemoryBudgetError:
    needed = smallest_memory(1, page_bytes, state_bytes, state_share)
    if state_share is None:
        pieces, piece = EXTRA_PIECES + 1, PieceLayout.of(page_bytes, state_bytes).num_bytes
        parts = f"{pieces} pieces of {format_bytes(piece)}, each a state of {format_bytes(state_bytes)} or pages"
    else:
        parts = f"{MIN_STATE_SLOTS} states of {format_bytes(state_bytes)} in state_share={state_share:g} of it"
    return MemoryBudgetError(
        f"CacheConfig: memory={format_bytes(memory)} does not suffice; one request needs at least "
        f"{format_bytes(needed)} ({parts}; a page has {format_bytes(page_bytes)}): CacheConfig(memory={needed})"
    )
