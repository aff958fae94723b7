"""The prefix cache: leases of running requests over a tree and its memory.

Every page and every state slot is, at every moment, free, private to one lease, or owned by one node of the tree. A
*lease* is what one running request holds. Its life:

    open      match; lock pages to the page hit and the checkpoint at the usable hit; allocate a front slot and pages
    reserve   allocate private pages for the tokens to come
    capture   allocate a slot for a checkpoint that the next forward pass writes
    advance   a pass is done: the front is valid after `num_tokens` tokens; the matched checkpoint is unlocked
    commit    hand finished pages and captured checkpoints to the tree; duplicates are freed, the block table points
              at the tree's
    close     give everything back

An allocation that fails changes nothing: the call returns None or False.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol, SupportsIndex
from weakref import WeakSet

import torch

from hybrid.cache.allocator import Allocator
from hybrid.cache.archives import Archives, Only
from hybrid.cache.audit import audit
from hybrid.cache.breakpoints import Breakpoints
from hybrid.cache.commit import Committer
from hybrid.cache.config import CacheConfig, settings_of
from hybrid.cache.explain import Explanation
from hybrid.cache.lease import Lease
from hybrid.cache.opener import Opener
from hybrid.cache.pins import Pin, Pins
from hybrid.cache.placement import of_prompt, spare
from hybrid.cache.restorer import Restorer
from hybrid.cache.restores import Restores, wait_until_restored
from hybrid.cache.session_hints import SessionHints
from hybrid.cache.snapshot import take_snapshot
from hybrid.cache.stats import CacheStats
from hybrid.cache.subscriptions import Subscriptions
from hybrid.cache.tiers import Tiers, make_tiers
from hybrid.checks import MAX_INT, boolean, count, integer, shown, text
from hybrid.errors import REFUSALS, ArgumentError, OwnershipError
from hybrid.events.feed import MAX_CHANGES, Feed
from hybrid.hints import NO_HINTS, Hints, check_hints
from hybrid.interrupts import deferred
from hybrid.key import Key, check_key
from hybrid.memory.copies import Contents
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.observe import notebook
from hybrid.observe.draw import Decode, draw
from hybrid.tiers.archive import Archive
from hybrid.tiers.fingerprint import Fingerprint
from hybrid.tiers.tier import CHECKPOINT, PAGE, clear_inconsistent
from hybrid.tiers.transfer import Transfer
from hybrid.tree.node import Checkpoint, Kind, Released
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree
from hybrid.units import ceil_div, format_bytes

log: logging.Logger = logging.getLogger(__name__)

GHOSTS_PER_PAGE, MIN_GHOSTS = 4, 1 << 17
"""The tree remembers this many evicted prefixes for each page of the memory, and at least this many: about 15 MB."""

SPARE_SHARE = 0.25
"""Spare checkpoints leave this part of the memory free."""


def refuse_copy(owner: object) -> NoReturn:
    """Refuse to copy or pickle: for the `__reduce_ex__` of what cannot be.

    Raises:
        OwnershipError: always.
    """
    raise OwnershipError(
        f"{type(owner).__name__} cannot be copied or pickled: its memory has one owner. Engine.with_cache makes one "
        "more on the same weights; another process loads the checkpoint itself, and may load what this one has saved"
    )


class _Owner:
    """The thread that owns a cache: the first that claims it, until another adopts it. In a process that is forked
    later it is none of the threads: those of PyTorch do not exist there, and a pass may wait for them for ever."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._process = 0
        self._claiming = threading.RLock()  # a signal handler may claim, too

    def adopt(self) -> None:
        """Make the calling thread the owner."""
        self._process = os.getpid()
        self._thread = threading.get_ident()

    def claim(self) -> None:
        """Make the calling thread the owner, if there is none."""
        if self._thread != threading.get_ident() or self._process != os.getpid():
            with self._claiming:  # of two threads that come together, one becomes the owner
                if self._thread is None:
                    self.adopt()
            self.check()

    def check(self) -> None:
        """Check that no other thread is the owner.

        Raises:
            OwnershipError: one is, or one of the process that this one was forked from.
        """
        if self._thread is None:
            return
        if self._process != os.getpid():
            raise OwnershipError(
                "this process was forked from the one that owns this cache, and does not have its threads, for which a "
                "pass may wait for ever. Load the model in this process, or start processes with 'spawn'; adopt() "
                "makes the calling thread the owner of this process's copy"
            )
        if self._thread != threading.get_ident():
            raise OwnershipError(
                "another thread owns this cache; only stats() may be called from here. To hand the cache over, call "
                "adopt() in the thread that is to own it"
            )


class Clearable(Protocol):
    """A thing that has learned from the requests of a cache, and can forget it."""

    def clear(self) -> None:
        """Forget what those have left that have ended."""
        ...


class Restartable(Protocol):
    """A thing that holds leases of a cache, and can start again without them."""

    def start_again(self) -> None:
        """Record that all leases and pins have ended."""
        ...


class HybridCache:
    """A prefix cache for models that keep pages of KV and states.

    One thread owns a cache: the first that changes something, until another calls `adopt`. Every call that changes
    something raises OwnershipError in any other thread, and has changed nothing. `stats()` may be called from any
    thread at any time: each of its figures was right at some moment during the call.

    Every call with a lease raises OwnershipError, and has changed nothing, where the lease was closed or belongs to
    another cache; and, but for `proceed` and `close`, where a pass of it was discarded or it waits for a disk.

    Args:
        memory: the pages and state slots to manage; see `CacheMemory`. A memory belongs to one cache.
        config: page size, grid, eviction policy and placement. Its `memory`, `state_share` and `state_dtype` have been
            used by the caller that made the memory.
        on_evict: called with what is evicted, before it is freed; for tests and metrics. Must not call the cache.
        model: with `config.disk`: a name for the model and its weights, or a whole fingerprint.

    Raises:
        ArgumentError: `config` needs contents that can be read, or a model, and there are none; or a type is wrong.
        MemoryBudgetError: there is less host memory than `config.host`.

    Attributes:
        config, memory: as given.
        tree: which pages and checkpoints are kept, and for which tokens.
        allocator: allocates from the memory, and has the tree evict.
        pins: prefixes that are protected from eviction.
        breakpoints: those of the pins that prompts have named.
        leases: the open leases.
        tiers: copies in host memory and on disk; None: `config` asks for none.
        restores: brings back what they have; None: there are none.
        on_clear: what keeps tokens of requests that have ended: cleared with the cache, while others refer to it.
        on_reset: what holds leases, and starts again when the cache was reset.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    def __init__(
        self,
        memory: CacheMemory,
        config: CacheConfig | None = None,
        *,
        on_evict: Callable[[Released], None] | None = None,
        model: str | Fingerprint | None = None,
    ) -> None:
        config = settings_of(memory, config)
        self.config: CacheConfig = config
        self.memory: CacheMemory = memory
        sizes = memory.sizes
        self._stats = CacheStats(page_bytes=sizes.page, checkpoint_bytes=sizes.checkpoint) if sizes else CacheStats()
        self.tiers: Tiers | None = make_tiers(memory, config, model, self._stats)
        self._on_evict = on_evict
        self._owner = _Owner()
        host, disk = (self.tiers.host, self.tiers.disk) if self.tiers is not None else (None, None)
        self._subscriptions = Subscriptions(memory, host, disk, self.claim)
        self.on_clear: WeakSet[Clearable] = WeakSet()
        self.on_reset: WeakSet[Restartable] = WeakSet()
        self._shares: dict[str, float] = {}
        self._is_bookkeeping = False
        self._is_suspect = False  # an exception has left bookkeeping, and the audit after it has not ended
        self._clock: Callable[[], float] | None = None
        self._begin()

    def __repr__(self) -> str:
        """Say how much of its memory is free, and what is cached."""
        total, free = self.memory.num_bytes
        size = f"{format_bytes(total)}, {format_bytes(free)} free, " if total else ""
        cached = f"{self.tree.num_pages} pages, {self.tree.num_checkpoints} checkpoints"
        return f"{type(self).__name__}({size}{cached} cached)"

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Have the policy know when requests come, in seconds: `lhd` learns when conversations are continued."""
        self._clock = clock
        self.tree.use_clock(clock)

    def _begin(self) -> None:
        """Make the bookkeeping of a memory of which nothing is in use."""
        memory, config = self.memory, self.config
        self.tree: Tree = self._new_tree()
        self.tree.use_clock(self._clock)
        self._subscriptions.follow(self.tree)
        self._digests = memory.digests() if config.verify_contents else None
        self.allocator: Allocator = Allocator(self.tree, memory, self._stats, self._digests, self._on_evict)
        self._opener = Opener(self.tree, memory, self.allocator)
        self.leases: set[Lease] = self._opener.leases
        self.pins: Pins = Pins(self.tree, memory, self.allocator)
        self.breakpoints: Breakpoints = Breakpoints(self.tree, self.pins)
        self._hints = SessionHints(self.tree, self.pins)
        self._committer = Committer(self.tree, memory, self.allocator)
        restorer = Restorer(self._opener, self._committer, self.allocator, memory)
        self._archives = Archives(self.tree, memory, config, self.allocator, restorer, self.tiers)
        self.restores: Restores | None = None
        self._audit = partial(audit, self.tree, memory, self.leases, self.pins, tiers=self.tiers)
        if self.tiers is not None and memory.sizes is not None:
            self.restores = Restores(
                self.tiers, self.tree, self._opener, restorer, memory.sizes, config, self._stats, self._audit
            )

    def _new_tree(self) -> Tree:
        offloader = self.tiers.offloader if self.tiers is not None else None
        tree = Tree(
            self.config.page_size,
            self.config.grid,
            policy_of(self.config.eviction),
            self.memory.prices,
            max_ghosts=max(MIN_GHOSTS, GHOSTS_PER_PAGE * self.memory.pages.capacity),
            seed=self.config.seed,
            priority_cap=self.config.priority_cap,
            leaving=offloader,
        )
        if offloader is not None:
            offloader.follow(tree)
        if self._shares:
            self._limit(tree, self._shares)
        return tree

    def limit_tenants(self, shares: Mapping[str, float]) -> None:
        """Give tenants shares of the memory, in place of those that they had: while one holds more, it is evicted from
        first. What it may hold while memory is free has no limit.

        Args:
            shares: parts of the memory for pages and checkpoints that are kept, by the names of tenants.
        """
        if shares != self._shares:
            with self.bookkeeping():
                self._limit(self.tree, shares)
                self._shares = dict(shares)

    def _limit(self, tree: Tree, shares: Mapping[str, float]) -> None:
        memory = self.memory
        tree.limit(shares, memory.pages.capacity, memory.checkpoints.capacity, memory.arena is None)

    # The memory

    @property
    def enabled(self) -> bool:
        """Tell whether what requests computed is kept for others."""
        return True

    @property
    def kv(self) -> torch.Tensor:
        """The pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; only where the cache has tensors. The
        device's next work waits for contents that are on their way."""
        return self.memory.settled.kv

    @property
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The state slots, `[num_slots, ...]` by name; only where the cache has tensors. The device's next work waits
        for contents that are on their way."""
        return self.memory.settled.state

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
        """Make the calling thread the owner of the cache. The former owner must not use it any more."""
        self._owner.adopt()

    def claim(self) -> None:
        """Make the calling thread the owner of a cache that has none. Raises OwnershipError: another thread owns it."""
        self._owner.claim()

    def check_owner(self) -> None:
        """Check that the calling thread may use the cache. It does not become its owner by that.

        Raises:
            OwnershipError: another thread owns the cache.
        """
        self._owner.check()

    # The life of a lease

    def open(self, key: Key, limit: int, num_tokens: int, priority: int = 0, tenant: str | None = None) -> Lease | None:
        """Start a request that may use up to `limit` cached tokens. None when its memory cannot be allocated now.

        Block tables may change while others open, reserve or capture: read them when the memory for a pass is
        allocated.

        Args:
            limit: up to `len(key) - 1`, so that a token is left to compute.
            num_tokens: tokens to allocate pages for at once.
            priority: how much its checkpoints matter among those of its tenant, for policies that ask.
            tenant: who sends it; None: its namespace.

        Raises:
            ArgumentError: `limit` is negative, or leaves no token to compute, or `key` is not a `Key`.
        """
        if isinstance(key, Key) and not 0 <= integer("open: limit", limit, -MAX_INT) < len(key):
            raise ArgumentError(f"open: limit must be from 0 to {len(key) - 1}, so that a token is left; got {limit}")
        return wait_until_restored(self.begin(key, limit, num_tokens, priority, tenant), self.restores)

    def open_whole(self, key: Key, num_tokens: int = 0, priority: int = 0, tenant: str | None = None) -> Lease | None:
        """Open for a caller that needs states and no logits: all of the key may be cached.

        Args:
            num_tokens: tokens to allocate pages for at once.
            priority: how much its checkpoints matter among those of its tenant, for policies that ask.
            tenant: who sends it; None: its namespace.
        """
        check_key("open_whole", key)
        return wait_until_restored(self.begin(key, len(key), num_tokens, priority, tenant), self.restores)

    def begin(
        self, key: Key, limit: int, num_tokens: int, priority: int = 0, tenant: str | None = None
    ) -> Lease | None:
        """Open (`limit` may be all of the key) without waiting for a disk: while `lease.restoring` is not None,
        call `proceed`. On a GPU what was restored may be on its way: wait for `memory.uploads` before it is used."""
        check_key("open", key)
        limit, num_tokens = count("open: limit", limit), count("open: num_tokens", num_tokens)
        if limit > len(key):
            raise ArgumentError(f"open: limit must be up to {len(key)}, the length of the key; got {shown(limit)}")
        priority = integer("open: priority", priority, -MAX_INT)
        if tenant is not None:
            text("open: tenant", tenant)
        self._owner.claim()
        self.pins.expire()
        lease = self._opener.open(key, limit, num_tokens, priority, tenant)
        if lease is not None and self.restores is not None:
            self.restores.begin(lease, limit)
        return lease

    def proceed(self, lease: Lease) -> bool:
        """Give a lease what was read for it meanwhile. False: it is being read. When this raises, close the lease."""
        self._refuse_closed(lease, even_void=True)
        return self.restores is None or self.restores.proceed(lease)

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Record that a pass computed `num_tokens` tokens of prompts in `seconds`, which restoring them must beat."""
        if self.tiers is not None:
            self.tiers.savings.compute.note(num_tokens, seconds)

    def record(self, explanation: Explanation) -> None:
        """Count a request and its hit in the statistics: once per request, however often its lease is opened."""
        self._owner.claim()
        if not isinstance(explanation, Explanation):
            raise ArgumentError(f"record: a lease's explanation is needed; got {shown(explanation)}")
        self._stats.count(explanation)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make sure that the lease has pages for `num_tokens` tokens. False, and nothing changed: no memory is left."""
        self._refuse_closed(lease)
        missing = ceil_div(count("reserve: num_tokens", num_tokens), self.config.page_size) - len(lease.block_table)
        if missing > 0:
            pages = self.allocator.allocate_pages(missing)
            if pages is None:
                return False
            self.allocator.give_pages(lease, pages)
        return True

    def reserve_from_free(self, lease: Lease, num_pages: int) -> bool:
        """Make sure that the lease has `num_pages` pages, from memory that is free: nothing is evicted. False, and
        nothing changed, when there is too little."""
        self._refuse_closed(lease)
        missing = num_pages - len(lease.block_table)
        if missing > 0:
            pages = self.memory.pages.allocate(missing)
            if pages is None:
                return False
            self.allocator.give_pages(lease, pages)
        return True

    def swap_pages(self, lease: Lease, first: int, second: int) -> None:
        """Have two private pages of the lease change places in its block table: of several continuations that were
        computed, the one that is kept takes its place.

        Raises:
            ArgumentError: one of them is not private, or there is none.
        """
        self._refuse_closed(lease)
        if not lease.num_shared <= min(first, second) <= max(first, second) < len(lease.block_table):
            raise ArgumentError(
                f"swap_pages: places {first} and {second} of {len(lease.block_table)} pages, of which the first "
                f"{lease.num_shared} are shared"
            )
        self.allocator.swap_pages(lease, first, second)

    def trim(self, lease: Lease, num_pages: int) -> None:
        """Free the lease's private pages after its first `num_pages`. Those that the tree owns stay."""
        self._refuse_closed(lease)
        if len(lease.block_table) > max(count("trim: num_pages", num_pages), lease.num_shared):
            self.allocator.free_pages(lease.cut(num_pages))

    def capture(self, lease: Lease, num_tokens: int, kind: Kind = Kind.PROMPT_END) -> Checkpoint | None:
        """Allocate a slot for the state after `num_tokens` tokens, which the next pass writes.

        None when there is no slot, when the checkpoint is not admitted (it would be worth less than what would be
        evicted for it), when the tree has a checkpoint there, or when the position is inside a unit of the key.

        Args:
            num_tokens: a multiple of the grid, beyond the front.
            kind: why it is kept: "branch", "prompt_end", "turn_end", "anchor", "user". An anchor is always admitted.

        Raises:
            ArgumentError: the position is not on the grid, not beyond the front, or captured already.
        """
        self._refuse_closed(lease)
        num_tokens = self._position(lease, num_tokens)
        if type(kind) is not Kind:
            if kind not in [*Kind]:
                raise ArgumentError(f"capture: kind must be one of {', '.join(Kind)}; got {shown(kind)}")
            kind = Kind(kind)
        if self._is_useless(lease, num_tokens):
            return None
        is_asked = kind is not Kind.ANCHOR and not self.memory.checkpoints.num_free
        if is_asked and not self._is_admitted(lease, num_tokens, kind):
            return None
        return self._capture(lease, num_tokens, kind, is_spare=kind is Kind.INTERVAL)

    def capture_spare(self, lease: Lease, num_tokens: int) -> Checkpoint | None:
        """Capture a checkpoint of the kind "interval" from free memory; arguments and errors as those of `capture`.
        None unless more than a quarter is free. Nothing is evicted, and the policy is not asked."""
        self._refuse_closed(lease)
        num_tokens = self._position(lease, num_tokens)
        if self.memory.free_state_share <= SPARE_SHARE or self._is_useless(lease, num_tokens):
            return None
        return self._capture(lease, num_tokens, Kind.INTERVAL, is_spare=True)

    def capture_along(
        self,
        lease: Lease,
        end: int,
        prefill_end: int,
        *,
        shared: Collection[int] = (),
        declared: Collection[int] = (),
        is_replay: bool = False,
    ) -> None:
        """Capture checkpoints between the front and `end`, which the next pass computes, where the placement puts them
        along a prompt: those that are worth evicting others for, and spare ones while memory is free.

        Args:
            prefill_end, shared, declared, is_replay: as in `hybrid.cache.placement.of_prompt`.
        """
        names, start, grid = self.config.placement, lease.front_tokens, self.tree.grid
        wanted = of_prompt(
            names,
            prefill_end,
            grid,
            branching_len=lease.branching_len,
            shared=shared,
            declared=declared,
            is_replay=is_replay,
            hit=lease.num_hit_tokens,
            spacing=self.tree.anchor_spacing(prefill_end),
            key=lease.key,
        )
        for position, kind in wanted.items():
            if start < position <= end:
                self.capture(lease, position, kind)
        if "geometric" in names and not is_replay:
            taken = {checkpoint.num_tokens for checkpoint in lease.captured}
            for position in spare(start, end, grid, self.memory.free_state_share):
                if position in taken or lease.key.whole(position, 1) != position:
                    continue
                if self.capture_spare(lease, position) is None:
                    break

    def _position(self, lease: Lease, num_tokens: int) -> int:
        """Check where a state is to be captured."""
        num_tokens = integer("capture: num_tokens", num_tokens, 0)
        if num_tokens % self.tree.grid:
            raise ArgumentError(f"capture: {num_tokens} is not a multiple of the grid of {self.tree.grid}")
        if num_tokens <= lease.front_tokens:
            raise ArgumentError(f"capture: the state after {num_tokens} tokens; the front is at {lease.front_tokens}")
        if lease.captures(num_tokens):
            raise ArgumentError(f"capture: the state after {num_tokens} tokens is captured already")
        return num_tokens

    def _is_useless(self, lease: Lease, num_tokens: int) -> bool:
        """Tell whether no match could use a checkpoint there, or the tree has one."""
        if num_tokens > len(lease.key):
            return False
        if lease.key.whole(num_tokens, 1) != num_tokens:
            return True
        node = lease.shared_node
        if node is not None and node.end < num_tokens and not node.children:
            return False  # the usual case: the tree has nothing beyond the lease's pages
        return self.tree.peek(lease.key, num_tokens).num_tokens == num_tokens

    def _is_admitted(self, lease: Lease, num_tokens: int, kind: Kind) -> bool:
        """Ask the policy. A checkpoint that is not admitted is remembered all the same, so that the policy learns what
        it missed."""
        usage = lease.lost.setdefault(num_tokens, self.tree.new_usage(kind, lease.turn, lease.path))
        self.tree.stored_for(usage, lease.tenant or lease.key.namespace, lease.priority)
        above = [checkpoint.num_tokens for checkpoint in lease.captured if checkpoint.num_tokens < num_tokens]
        node = lease.shared_node
        if node is not None and node.slot is None:
            node = node.checkpoint_above()
        while node is not None and node.end >= num_tokens:
            node = node.checkpoint_above()
        above.append(node.end if node is not None else 0)
        if self.tree.admits(usage, num_tokens, max(above), kind == Kind.TURN_END, self.memory.arena is not None):
            return True
        return self.tiers is not None and self.tiers.offloader.would_copy(usage, num_tokens - max(above))

    def _capture(self, lease: Lease, num_tokens: int, kind: Kind, is_spare: bool = False) -> Checkpoint | None:
        slot = self.allocator.allocate_state()
        if slot is None:
            return None
        checkpoint = Checkpoint(slot, num_tokens, kind, lease.priority, lease.turn, is_spare, lease.tenant)
        lease.captured.append(checkpoint)
        return checkpoint

    def take_back(self, lease: Lease) -> bool:
        """Make sure that the lease has its back slot, the second of the ping-pong pair. False, and nothing changed,
        when there is no memory for one."""
        self._refuse_closed(lease)
        if lease.back is None:
            lease.back = self.allocator.allocate_state()
        return lease.back is not None

    def swap(self, lease: Lease) -> None:
        """Record that a pass has read the front and written the back: they change places, and the old state stays in
        the back.

        Raises:
            OwnershipError: there is no back slot, or the pass did not read the front: the first pass reads the matched
                checkpoint, or the empty state. Nothing was changed.
        """
        self._refuse_closed(lease)
        if lease.back is None:
            raise OwnershipError("swap: the lease has no back slot; call take_back before the pass")
        if lease.read_slot != lease.front:
            raise OwnershipError("swap: the first pass of a lease does not read its front, and must write the front")
        lease.front, lease.back, lease.back_tokens = lease.back, lease.front, lease.front_tokens

    def advance(self, lease: Lease, num_tokens: int) -> None:
        """Record that a pass is done: the front holds the state after `num_tokens` tokens. The matched checkpoint is
        unlocked.

        Raises:
            ArgumentError: `num_tokens` is before the front, or beyond the pages of the lease.
            OwnershipError: the front was donated.
        """
        self._refuse_closed(lease)
        num_tokens, end = count("advance: num_tokens", num_tokens), len(lease.block_table) * self.config.page_size
        if not lease.front_tokens <= num_tokens <= end:
            raise ArgumentError(f"advance: to {num_tokens} tokens, from {lease.front_tokens} on, with pages for {end}")
        if lease.front == EMPTY_STATE:
            raise OwnershipError("advance: the front of the lease was donated")
        if lease.state_lock is not None:
            self.allocator.unlock(lease.state_lock)
            lease.state_lock = None
        lease.read_slot = lease.front
        lease.front_tokens = num_tokens

    def undo_advance(self, lease: Lease, num_tokens: int, swapped: bool) -> None:
        """Undo the last `advance`, and the `swap` before it: the pass turned out to write nothing for the lease.

        Args:
            num_tokens: where the front was, which the pass read.
            swapped: front and back changed places for the pass. The back counts as empty now.

        Raises:
            ArgumentError: the front is not beyond `num_tokens`, or is not the lease's own.
        """
        self._refuse_closed(lease)
        if num_tokens >= lease.front_tokens or lease.read_slot != lease.front:
            raise ArgumentError(
                f"undo_advance: to {num_tokens} tokens, from {lease.front_tokens}; to before its last pass only"
            )
        if swapped:
            self.swap(lease)
            lease.back_tokens = 0
        lease.read_slot, lease.front_tokens = lease.front, num_tokens

    def discard(self, lease: Lease) -> None:
        """Void a lease whose pass failed, or yielded numbers that are not finite: the slots that were captured and not
        committed are freed, and nothing else of it can be committed, captured or advanced. What was committed before
        stays. Close the lease when its request has ended."""
        self._refuse_closed(lease)
        lease.is_void = True
        slots = [checkpoint.slot for checkpoint in lease.captured]
        lease.captured = []
        self.allocator.free_states(slots)

    def commit(self, lease: Lease, key: Key, num_tokens: int) -> None:
        """Hand the pages of `[0, num_tokens)`, and the checkpoints captured there, to the tree.

        What the tree has already is freed, and the block table points at the tree's pages afterwards.

        Args:
            key: the lease's, or one that continues it by what was generated.
            num_tokens: a multiple of the page size, up to where the lease was advanced to.

        Raises:
            OwnershipError: `num_tokens` is not a multiple of the page size, or beyond what was advanced, or the key
                does not begin with the tokens that the lease was opened with. Nothing was changed.
        """
        self._refuse_closed(lease)
        self._committer.commit(lease, key, num_tokens)

    def donate_states(self, lease: Lease, limit: int) -> None:
        """At the end of a request's life: offer the front, or else the back, for the next commit, where it is on the
        grid. It becomes the tree's without a copy. A lease whose front was donated cannot be advanced any more.

        Args:
            limit: tokens of the key up to which a checkpoint may be put.
        """
        self._refuse_closed(lease)
        limit = integer("donate_states: limit", limit, -MAX_INT)
        own = lease.front != EMPTY_STATE and lease.read_slot == lease.front
        if own and self._can_be_donated(lease, lease.front_tokens, limit):
            lease.captured.append(self._turn_end(lease, lease.front, lease.front_tokens))
            lease.front = EMPTY_STATE
        elif lease.back is not None and self._can_be_donated(lease, lease.back_tokens, limit):
            lease.captured.append(self._turn_end(lease, lease.back, lease.back_tokens))
            lease.back = None

    @staticmethod
    def _turn_end(lease: Lease, slot: int, num_tokens: int) -> Checkpoint:
        return Checkpoint(slot, num_tokens, Kind.TURN_END, lease.priority, lease.turn, tenant=lease.tenant)

    def _can_be_donated(self, lease: Lease, num_tokens: int, limit: int) -> bool:
        on_grid = 0 < num_tokens <= limit and num_tokens % self.tree.grid == 0
        return on_grid and not lease.captures(num_tokens) and lease.key.whole(num_tokens, 1) == num_tokens

    def end_turn(self, lease: Lease, num_tokens: int) -> None:
        """Record that a request's turn ends after `num_tokens` tokens, all committed: a checkpoint there becomes a
        turn's end."""
        self._refuse_closed(lease)
        self._committer.end_turn(lease, num_tokens)

    def fork(self, lease: Lease) -> Lease | None:
        """Open a second lease of the same tokens, up to the front of one that was advanced: the prompt of several
        answers is computed once.

        Pages that the tree owns are shared. The other pages up to the front, and the front itself, are copied. None,
        and nothing changed, when there is no memory for that.
        """
        self._refuse_closed(lease)
        num_tokens, num_shared = lease.front_tokens, lease.num_shared
        num_private = ceil_div(num_tokens, self.config.page_size) - num_shared
        if lease.front == EMPTY_STATE or lease.read_slot != lease.front or num_private < 0:
            return None
        allocated = self.allocator.allocate_request(num_private)
        if allocated is None:
            return None
        front, pages = allocated
        copy = Lease(
            key=lease.key,
            num_known=lease.num_known,
            front=front,
            read_slot=front,
            front_tokens=num_tokens,
            num_hit_tokens=num_tokens,
            branching_len=None,
            explanation=lease.explanation,
            block_table=lease.block_table[:num_shared],
            num_shared=num_shared,
            page_lock=None,
            state_lock=None,
            priority=lease.priority,
            tenant=lease.tenant,
            turn=lease.turn,
        )
        self.leases.add(copy)
        self.allocator.give_pages(copy, pages)
        try:
            if (node := lease.shared_node) is not None:
                copy.page_lock = self.tree.lock_pages(node, num_shared * self.config.page_size)
                self.allocator.share(copy)
            if num_private:
                private = lease.block_table[num_shared : num_shared + num_private]
                self.memory.contents.move_pages(dict(zip(private, pages, strict=True)))
            self.memory.contents.move_states({lease.front: front})
        except BaseException:
            self.close(copy)
            raise
        return copy

    def close(self, lease: Lease) -> None:
        """Give back everything the lease holds.

        Raises:
            OwnershipError: it was closed before.
        """
        self._refuse_closed(lease, even_void=True)
        self._opener.close(lease)

    # What went bad

    def drop(self, key: Key, num_tokens: int) -> None:
        """Drop the first `num_tokens` tokens of a key, and whatever continues from one of them, here and in all tiers:
        a pass that resumed from them gave NaN or infinity. Pins of them end. What a running request holds stays until
        that gives it back."""
        with self.bookkeeping():
            found = self.tree.peek(key, num_tokens)
            names = self.tree.names.of(key, num_tokens, found.deepest, found.num_page_tokens)
            nodes = self.tree.nodes_beyond(key, num_tokens, 0)
            self.pins.remove_on({*nodes})
            with self.tiers.discarding_evicted() if self.tiers is not None else nullcontext():
                self.allocator.evict(partial(self.tree.evict_nodes, nodes, 0))
            if self.tiers is not None:
                self.tiers.drop((kind, name) for name in names for kind in (PAGE, CHECKPOINT))
            self._stats.dropped_hits += 1

    # Pins

    def pin(self, key: Key, ttl: float = math.inf) -> Pin | None:
        """Protect what is usable of a key from eviction. None when nothing is.

        Args:
            ttl: seconds until the pin ends by itself.

        Raises:
            ArgumentError: `ttl` is not a positive number.
            MemoryBudgetError: more than half of the memory would be pinned. Nothing was changed.
        """
        with self.bookkeeping():
            return self.pins.add(key, ttl)

    def extend_pin(self, pin: Pin, key: Key) -> None:
        """Have a pin protect what is usable of a key by now. A pin that has ended stays so, and so does one of whose
        key nothing is usable.

        Args:
            key: continues the pin's.

        Raises:
            MemoryBudgetError: more than half of the memory would be pinned. The pin is as it was.
        """
        with self.bookkeeping():
            self.pins.extend(pin, key)

    def unpin(self, pin: Pin) -> None:
        """End a pin. One that has ended stays so. What is not a `Pin` is an `ArgumentError`."""
        with self.bookkeeping():
            self.pins.remove(pin)

    def hint(self, key: Key, hints: Hints = NO_HINTS, *, session: str | None = None, tenant: str | None = None) -> None:
        """Note what a client knows of what its request has left, after its lease was closed. Nothing is pinned beyond
        the limits of pins.

        Args:
            key: of the prompt and the answer.
            session: groups the requests of a client; None: it is of none.
            tenant: who sends it; None: its namespace.

        Raises:
            ArgumentError: a type is wrong.
        """
        check_key("hint", key)
        check_hints("hint", hints)
        with self.bookkeeping():
            self._hints.ended(key, hints, session, tenant)

    def hint_session(self, session: str, hints: Hints, *, namespace: str = "", tenant: str | None = None) -> bool:
        """Note what a client knows of a session between its requests: when it continues (`expect_resume`), or that it
        has ended. Returns whether the session is known."""
        check_hints("hint_session", hints)
        with self.bookkeeping():
            return self._hints.of_session(session, hints, namespace, tenant)

    def keep_breakpoint(self, key: Key, num_tokens: int, ttl: float, tenant: str) -> bool:
        """Pin the first `num_tokens` tokens of a key, or renew their pin: until they were not used for `ttl` seconds.
        Returns whether there is a checkpoint, and room among the pins; where not, a tenant with more gives way."""
        with self.bookkeeping():
            return self.breakpoints.keep(key, num_tokens, ttl, tenant)

    def expire_next_pin(self) -> bool:
        """End the pin that would expire first, because no request could run otherwise. False when there is none."""
        with self.bookkeeping():
            return self.pins.remove_next_to_expire()

    # Files

    def save(
        self,
        path: str | Path,
        keys: Iterable[Key] | None = None,
        *,
        namespace: str | None = None,
        model: str | Fingerprint,
    ) -> Transfer:
        """Write cached prefixes to a file, up to their last checkpoints. Only its owner may read it; it holds the token
        ids. A file that is there is replaced when all is written.

        Args:
            keys: prompts; None: everything, or everything of `namespace`.
            model: names the model and its weights: a cache loads what was saved under the same name. Or a whole
                fingerprint.

        Raises:
            PromptError: nothing is cached of one of the keys.
            CacheFileError: the file cannot be written.
            ArgumentError: the memory has no contents that can be read.
        """
        archive = self.archive(keys, namespace=namespace, model=model)
        archive.write(path)
        return archive.transfer

    def archive(
        self,
        keys: Iterable[Key] | None = None,
        *,
        namespace: str | None = None,
        model: str | Fingerprint,
        after: int = 0,
        only: Only | None = None,
    ) -> Archive:
        """Copy cached prefixes into an archive in memory; arguments and errors as those of `save`.

        Args:
            after: leave out the pages of the first `after` tokens: who loads it has them.
            only: "deepest": leave out checkpoints but the last of each key, or of each path where there are no keys.
        """
        with self.bookkeeping():
            return self._archives.collect(keys, namespace, model, after, only)

    def load(
        self,
        source: str | Path | Contents | Archive,
        *,
        model: str | Fingerprint,
        vocab_size: int | None = None,
    ) -> Transfer:
        """Bring prefixes of a file, an archive, or its `to_bytes`, into the cache: each checkpoint with all pages
        before it, or not at all. Evicts for them as a request does; what there is no memory for goes to the tiers.

        Args:
            model: the name, or the fingerprint, under which it was saved.
            vocab_size: of the model, if it may get drafts from this cache: what has other token ids is refused.

        Raises:
            CacheFileError: it is damaged, or of another model, other settings or another version. Nothing was changed.
            ArgumentError: the memory has no contents that can be written.
        """
        with self.bookkeeping():
            return self._archives.load(source, model, vocab_size)

    # The whole

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Run what changes the cache whole, a step of an engine or a single call: handlers of signals run after it.

        An exception that leaves it, unless it refuses what was asked, has the cache audited, and emptied where the
        audit fails (`reset_if_inconsistent`). Leases that are not among `leases` then have ended, and their requests
        have to run again. Within another one it does nothing. A pass of the model within it lets handlers run
        (`hybrid.interrupts.handlers_allowed`).

        Raises:
            OwnershipError: another thread owns the cache.
        """
        self._owner.claim()
        if self._is_bookkeeping:
            yield
            return
        with deferred():
            if self._is_suspect:
                self.reset_if_inconsistent()
            self._is_bookkeeping = True
            try:
                yield
            except REFUSALS:  # nothing was changed
                raise
            except BaseException as error:
                self.reset_if_inconsistent(error)
                raise
            finally:
                self._is_bookkeeping = False

    def reset_if_inconsistent(self, error: BaseException | None = None) -> bool:
        """Empty the cache where its audit fails. Returns whether it did: all leases and pins have ended then.

        Args:
            error: the exception after which it is audited, for the log.
        """
        self._owner.claim()
        self._is_suspect = True  # until this has ended, which a recursion that is too deep prevents
        try:
            self.audit()
            is_consistent = True
        except Exception as wrong:
            log.error("the cache is emptied: its bookkeeping is inconsistent after %r; %s", error, wrong)
            self.reset()
            is_consistent = False
        self._is_suspect = False
        return not is_consistent

    def clear(self) -> None:
        """Evict everything that no running request needs and no pin protects. Drafters forget it, too."""
        with self.bookkeeping(), self.tiers.discarding() if self.tiers is not None else nullcontext():
            self.allocator.evict(self.tree.evict_all)
            for own in [*self.on_clear]:
                own.clear()

    def reset(self) -> None:
        """Forget all that is cached, for a cache that an exception has left inconsistent. Its leases and pins have
        ended then, and are not to be closed. Copies in tiers stay, but those of a tier that is inconsistent too."""
        self._owner.claim()
        with deferred():
            self._stats.resets += 1
            for lease in self.leases:
                if lease.restoring is not None:
                    lease.restoring.drop()
                    lease.restoring = None
            clear_inconsistent(self.tiers.places if self.tiers is not None else ())
            self.memory.reset()
            self._begin()
            for user in [*self.on_reset]:
                user.start_again()

    def shutdown(self) -> None:
        """Clear the cache for good: what is worth it is written to disk before. Waits for it for a minute at most."""
        with self.bookkeeping():
            if self.tiers is not None and self.tiers.begin_shutdown():
                self.allocator.evict(self.tree.evict_all)
                self.tiers.close()
            self.clear()

    def stats(self) -> CacheStats:
        """Count what the cache did and holds. May be called from any thread."""
        now, tree, memory = replace(self._stats), self.tree, self.memory
        now.pages_total, now.pages_free = memory.pages.capacity, memory.pages.num_free
        now.states_total, now.states_free = memory.checkpoints.capacity, memory.checkpoints.num_free
        now.pages_cached, now.checkpoints = tree.num_pages, tree.num_checkpoints
        now.pages_private, now.states_private = self.allocator.num_private()
        if self.tiers is not None:
            self.tiers.fill_in(now)
        now.pins, now.policy_failure = len(self.pins), tree.policy_failure
        if (guard := tree.guard) is not None:
            now.lru_is_on, now.lru_switches, now.lru_lead = guard.is_on, guard.switches, guard.lru_hits - guard.hits
        now.shares = {name: (tree.held(name), share) for name, share in self._shares.items()}
        return now

    def subscribe(self, limit: int = MAX_CHANGES, *, with_values: bool = False) -> Feed:
        """Follow what the cache has: births and deaths of pages and checkpoints on its device, and of copies of
        checkpoints in host memory, by the digests of their prefixes. They are numbered; `Feed.since` gives those after
        a number, `Feed.snapshot` all that there is. Ends with `Feed.close`. Where nothing is subscribed, nothing of it
        is computed.

        Args:
            limit: changes that the feed remembers.
            with_values: checkpoints that come have the ranks that the policy gives them, which takes longer than all
                else of a change.

        Raises:
            ArgumentError: `limit` is not a positive integer, or `with_values` no truth value.
        """
        limit, with_values = integer("subscribe: limit", limit, 1), boolean("subscribe: with_values", with_values)
        with self.bookkeeping():
            return self._subscriptions.subscribe(limit, with_values)

    def draw(self, path: str | Path | None = None, decode: Decode | None = None, *, width: int = 100) -> str:
        """Draw the tree, as text or as a page `path` for a browser; `decode` makes text of ids: see `observe.draw`."""
        return draw(take_snapshot(self.tree, self.stats(), self.tiers), path, decode, width=width)

    def _repr_html_(self) -> str:
        """Draw what a notebook shows of it."""
        stats = self.stats()
        return notebook.memory(stats.kinds, self.memory.num_bytes[1], stats.rows, self.draw())

    def audit(self, contents: bool = False) -> None:
        """Prove that every page and every slot is in exactly one place, and that the tree is consistent.

        Args:
            contents: also read every page and checkpoint of the tree, and compare it with the digest that was taken
                when it was committed. Needs `CacheConfig(verify_contents=True)`.

        Raises:
            AuditError: it is not so; the message names what is wrong.
            ArgumentError: `contents`, and no digests were taken.
        """
        if contents and self._digests is None:
            raise ArgumentError("audit: contents need CacheConfig(verify_contents=True), or verify_contents()")
        self._audit(self._digests if contents else None)

    def _refuse_closed(self, lease: Lease, *, even_void: bool = False) -> None:
        self._owner.claim()
        self._opener.refuse_closed(lease, even_void)
