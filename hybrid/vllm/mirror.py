"""A tree of this project beside vLLM's block pool: it mirrors what is cached there, and says what leaves.

vLLM's lookup by hashes stays the only truth. Methods of the manager's instances are wrapped, and its pool gets another
queue of free blocks. Whatever raises in here is caught: vLLM's own queue and methods are put back, and it continues
as if none of this had been there.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from hybrid.errors import ArgumentError
from hybrid.hints import NO_HINTS
from hybrid.key import TOKEN_BYTES, Key
from hybrid.mirror.page_parts import PageParts
from hybrid.mirror.pins import NamedPins
from hybrid.mirror.visits import StateOrigin, Visits
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.names import Names, ids_as_names
from hybrid.tree.node import Checkpoint, Kind, Lock, Node
from hybrid.tree.policies import policy_of
from hybrid.tree.sessions import Sessions
from hybrid.tree.tree import Tree
from hybrid.units import Prices, ceil_div
from hybrid.vllm.options import VllmOptions
from hybrid.vllm.queue import Block, FreeBlocks
from hybrid.vllm.request_options import PLAIN, RequestOptions, options_of
from hybrid.vllm.stats import Counts, MirrorStats

WORDS = 4
"""Ids of the tree per block: vLLM's hash of a block covers all before it, and adapters, images and salts with it. 128
bits of it stand for the block, so that a key is made without looking at a token."""

HASH_BYTES = WORDS * TOKEN_BYTES

logger = logging.getLogger("vllm.hybrid")  # below vLLM's own, whose handler it has


MAX_SIBLINGS = 64
"""Requests that wait, and are looked at for what they share with one that is served."""

MAX_WARNINGS = 20
"""Lines about options of requests that are wrong."""

MAX_PINNED = 0.5
"""The part of the blocks that pins and holds may protect."""


class TablePages:
    """The first pages of a request, as a tree takes them: for each a tuple with a block of each group.

    Args:
        tables: of its groups of attention.
        start: those before it are the tree's own.
        end: number of them.
    """

    __slots__ = ("_end", "_tables", "start")

    def __init__(self, tables: Sequence[Sequence[Block]], start: int, end: int) -> None:
        self._tables, self._end, self.start = tables, end, start

    def __len__(self) -> int:
        return self._end

    def __getitem__(self, where: slice) -> list[tuple[Block, ...]]:
        start, end, _ = where.indices(self._end)
        return [*zip(*(table[start:end] for table in self._tables), strict=True)]


class Visit:
    """A request that vLLM has looked up, or has cached blocks of.

    Attributes:
        options: its own.
        key: one hash for each full block so far.
        lock: on the pages that it uses; None: it uses none.
        sources: locks on the states that its passes start from, as long as it holds their blocks.
        num_pages: blocks of it that were inserted.
        found: tokens that vLLM has found of it; None: it was not looked up.
        anchor: blocks up to its last anchor.
        is_apart: the tree may have let go of blocks that it uses.
        is_first: it waits for room for the first time.
    """

    __slots__ = (
        "anchor",
        "found",
        "is_apart",
        "is_first",
        "key",
        "lock",
        "num_pages",
        "options",
        "sources",
    )

    def __init__(self, options: RequestOptions) -> None:
        self.options = options
        self.key: Key = Key(b"")
        self.lock: Lock | None = None
        self.sources: list[Lock] = []
        self.num_pages: int = 0
        self.found: int | None = None
        self.anchor: int = 0
        self.is_apart: bool = False
        self.is_first: bool = False


def _num_common(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Number of blocks that two requests begin with. Each hash is of all before it too."""
    both = range(min(len(hashes), len(others)))
    return bisect_left(both, True, key=lambda at: hashes[at] != others[at])


class Mirror:
    """Puts a tree beside vLLM's manager, from now on.

    Args:
        manager: vLLM's `KVCacheManager`, of a model that was accepted (`hybrid.vllm.options.refuse_unsupported`).
        pages, states: its managers of full attention, and of states.
        plain_queue: makes vLLM's own queue of free blocks.
        options: of this plugin.
        waiting: the requests that wait, those first that are served first.

    Attributes:
        tree: the tree. A block is one page of `WORDS` ids.
        pins: states that are not evicted.
        holds: the states from which requests start that wait and asked for that.
        counts: what was seen and done.
        failure: what has raised, and put vLLM's own order back; None: nothing has.
    """

    def __init__(
        self,
        manager: Any,
        pages: list[Any],
        states: list[Any],
        plain_queue: Callable[[list[Block]], Any],
        options: VllmOptions,
        waiting: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._manager, self._pool = manager, manager.block_pool
        self._pages, self._states = pages, states
        self._plain_queue = plain_queue
        self._options = options
        self._waiting = waiting
        self._block_size: int = pages[0].block_size
        self.counts: Counts = Counts()
        self.failure: Exception | None = None
        self._owned: set[int] = set()
        self._renew()
        self._queue = FreeBlocks(self._pool.free_block_queue.get_all_free_blocks(), self._owned, self.evict, self._fail)
        self._pool.free_block_queue = self._queue
        self._wrapped: list[tuple[Any, str]] = []
        self._wrap(manager, "get_computed_blocks", self._get_computed_blocks)
        self._wrap(manager, "allocate_slots", self._allocate_slots)
        self._wrap(manager, "free", self._free)
        self._wrap(manager, "pop_blocks_for_free", self._free)
        self._wrap(manager, "reset_prefix_cache", self._reset_prefix_cache)
        self._wrap(manager.coordinator, "cache_blocks", self._cache_blocks)

    def _renew(self) -> None:
        self._owned.clear()
        self._requests: dict[str, Visit] = {}
        self._unkept: dict[str, int] = {}  # place of a state that its request holds and the tree may not have
        policy = policy_of(self._options.policy)
        self._learns = isinstance(policy, LearnedHitDensity)
        self.tree: Tree = Tree(
            WORDS,
            WORDS,
            policy,
            Prices(len(self._pages), len(self._states), self._options.anchors * (self._pool.num_gpu_blocks - 1)),
            seed=self._options.seed,
            page_values=PageParts.of,
            leaving=self.counts,
            names=Names(WORDS, ids_as_names),
        )
        self.visits: Visits = Visits(self.tree, self._learns)
        self.pins: NamedPins = NamedPins(self.tree)
        self.holds: NamedPins = NamedPins(self.tree)
        self.sessions: Sessions = Sessions(self.tree, lambda: self.visits.seconds)

    def stats(self) -> MirrorStats:
        """A snapshot of what was seen and done."""
        counts = {**vars(self.counts), "refused": dict(self.counts.refused), "evicted": dict(self.counts.evicted)}
        guard, lead = self.tree.guard, None
        if guard is not None:
            lead = (guard.lru_hits - guard.hits) // WORDS * self._block_size
        return MirrorStats(
            lru_hit_tokens=self.counts.hit_tokens + lead if lead is not None else None,
            lru_is_on=guard is not None and guard.is_on,
            lru_switches=guard.switches if guard is not None else 0,
            policy=self._options.policy,
            policy_failure=self.tree.policy_failure,
            failure=repr(self.failure) if self.failure is not None else None,
            states=self.tree.num_checkpoints,
            pages=self.tree.num_pages,
            pins=len(self.pins),
            **counts,
        )

    # Wrapping

    def _wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        setattr(owner, name, partial(ours, getattr(owner, name)))
        self._wrapped.append((owner, name))

    def _fail(self, error: Exception, taken: list[Block]) -> Any:
        """Put vLLM's own queue and methods back. The blocks that were taken out of ours are the first in it."""
        self.failure = error
        self._pool.free_block_queue = self._plain_queue([*taken, *self._queue.get_all_free_blocks()])
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        logger.warning(
            "hybrid: an error in the mirror; from here on vLLM evicts as it does without --scheduler-cls, by LRU. "
            "Answers are not affected. Please report this",
            exc_info=error,
        )
        return self._pool.free_block_queue

    # What vLLM calls, each with its own method first

    def _get_computed_blocks(self, theirs: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks, num_tokens, boundary = theirs(request, *args, **kwargs)
        if self.failure is None:
            try:
                if self._manager.prefix_cache_lookup_enabled(request):
                    boundary = self.looked_up(request, num_tokens, boundary)
            except Exception as error:
                self._fail(error, [])
        return blocks, num_tokens, boundary

    def _allocate_slots(self, theirs: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        visit = self._requests.get(request.request_id)
        begins = visit is not None and visit.lock is None and not visit.num_pages
        if visit is None or not (begins or visit.sources):
            return theirs(request, *args, **kwargs)
        try:
            if begins:
                self.protect(request, visit)
        except Exception as error:
            self._fail(error, [])
        allocated = theirs(request, *args, **kwargs)
        if self.failure is None:
            try:
                self.allocated(request, visit, begins, allocated is not None)
            except Exception as error:
                self._fail(error, [])
        return allocated

    def _cache_blocks(self, theirs: Callable[..., Any], request: Any, num_tokens: int) -> None:
        try:
            before = self._before_caching(request, num_tokens)
            keeps = self._states if before is not None and self._keeps(request, num_tokens) else ()
        except Exception as error:
            self._fail(error, [])
            before = None
        if before is None:
            return theirs(request, num_tokens)
        for group in keeps:
            group.cache_blocks = partial(self._cache_states, group.cache_blocks)
        try:
            theirs(request, num_tokens)
        finally:
            for group in keeps:
                del group.cache_blocks
        if self.failure is None:
            try:
                self._forget_unkept(request.request_id)
                now = self._num_cached(request.request_id)
                if now[0] > before[0] or now[1] > before[1]:
                    self.cached(request, before[1], *now)
            except Exception as error:
                self._fail(error, [])
        return None

    def _before_caching(self, request: Any, num_tokens: int) -> tuple[int, int] | None:
        """Blocks of a request that have a hash, before vLLM caches more; None: nothing follows from this call.

        vLLM takes blocks or lets go of some at the prompt's end, at a block's, and after these. It calls this for every
        token of an answer: of all others nothing follows, unless the request holds a state that is not kept.
        """
        before, size = self._num_cached(request.request_id), self._block_size
        past = num_tokens - request.num_prompt_tokens
        is_inside = num_tokens // size <= before[0] and past > 1 and num_tokens % size != 1
        return None if is_inside and request.request_id not in self._unkept else before

    def _keeps(self, request: Any, num_tokens: int) -> bool:
        """Tell whether the state after a pass is to be kept where vLLM keeps none. An anchor costs no pass: it is after
        the first one that comes as far."""
        if num_tokens > request.num_prompt_tokens:
            return self._options.answers
        num_blocks = num_tokens // self._block_size
        if not self.visits.passes_anchor(request.request_id, num_blocks * WORDS):
            return False
        self._visit(request).anchor = num_blocks
        return True

    def _forget_unkept(self, rid: str) -> None:
        """Take the hash of a state that is not kept again: at every call vLLM gives one to the state at the prompt's
        last block that has none, as long as the request holds it."""
        place = self._unkept.get(rid)
        if place is None:
            return
        for group in self._states:
            block = group.req_to_blocks[rid][place]
            if block.is_null:
                del self._unkept[rid]
                return
            if block.block_id not in self._owned:
                self._pool._maybe_evict_cached_block(block)

    def _cache_states(
        self, theirs: Callable[..., Any], request: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the state at the end too: at an anchor, or at the last block of an answer, where the next turn
        continues."""
        try:
            kwargs["replay_boundaries"] = (*kwargs["replay_boundaries"], num_tokens)
        except Exception as error:
            self._fail(error, [])
        theirs(request, num_tokens, *args, **kwargs)

    def _free(self, theirs: Callable[..., Any], request: Any) -> Any:
        try:
            self.left(request)
        except Exception as error:
            self._fail(error, [])
        return theirs(request)

    def _reset_prefix_cache(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = theirs(*args, **kwargs)
        if done and self.failure is None:
            try:
                self._renew()
                self._queue.clear_content()
            except Exception as error:
                self._fail(error, [])
        return done

    def _num_cached(self, rid: str) -> tuple[int, int]:
        """Blocks of a request that have a hash, of pages and of states."""
        return self._pages[0].num_cached_block.get(rid, 0), self._states[0].num_cached_block.get(rid, 0)

    def came(self, request: Any) -> None:
        """A request has come, and waits."""
        if self.failure is None:
            try:
                if self._manager.prefix_cache_lookup_enabled(request):
                    self.hold(request)
            except Exception as error:
                self._fail(error, [])

    # What the tree does about it

    def hold(self, request: Any) -> None:
        """Keep what is cached of a request that asks for it until it has room, unless too much is kept already."""
        visit = self._visit(request)
        self.holds.expire()
        if visit.options.hold:
            node = self.tree.peek(visit.key, self._limit(request)).checkpoint
            if node is not None and self._may_pin(node):
                self.holds.put(request.request_id, node, visit.options.hold)

    def looked_up(self, request: Any, num_tokens: int, boundary: int) -> int:
        """A request was looked up. Counts as a use, once per request: vLLM looks for it again as long as it waits.

        Args:
            num_tokens: what vLLM found.
            boundary: where vLLM would make a state because pages continue there; 0: nowhere.

        Returns:
            Where a state is to be made.
        """
        visit, is_new = self._visit(request), request.request_id not in self.visits
        size = self._block_size
        limit = self._limit(request)
        found, known = self.visits.match(request.request_id, visit.key, limit, request.arrival_time)
        visit.found = num_tokens
        if is_new:
            visit.is_first = True
            self.counts.lookups += 1
            self.counts.differing += found.num_tokens // WORDS * size != num_tokens
            self.pins.expire()
        if not boundary and self._options.siblings:
            boundary = self._sibling_boundary(request, num_tokens // size) * size
        by_lru = self.tree.guard is not None and self.tree.guard.is_on
        if not boundary and self._options.ghost_branches and not by_lru and known > found.num_tokens:
            boundary = known // WORDS * size
        return int(boundary)

    def _sibling_boundary(self, request: Any, hit: int) -> int:
        """Where requests part that wait and begin as this one does: there they all can continue.

        Args:
            hit: blocks that were found of this one.

        Returns:
            A number of blocks, the one with which they have the least to compute; 0: none begins so.
        """
        hashes = request.block_hashes
        if len(hashes) <= hit:
            return 0
        shared = []
        for other in islice(self._waiting(), MAX_SIBLINGS):
            theirs = other.block_hashes
            if other is not request and len(theirs) > hit and theirs[hit] == hashes[hit]:
                shared.append(_num_common(hashes, theirs))
        shared.sort(reverse=True)
        saved = [(blocks - hit) * number for number, blocks in enumerate(shared, 1)]
        return shared[saved.index(max(saved))] if saved else 0

    def protect(self, request: Any, visit: Visit) -> None:
        """Protect what a request has found, from what makes room for the rest of it, and place its anchors."""
        if self._options.anchors:
            hit, end = (num // self._block_size * WORDS for num in (visit.found or 0, request.num_tokens))
            self.visits.place_anchors(request.request_id, hit, end)
        found = self.tree.peek(visit.key, self._limit(request))
        if found.deepest is not None:
            visit.lock = self.tree.lock_match(found)
        if found.checkpoint is not None:
            visit.sources.append(self.tree.lock_state(found.checkpoint))

    def allocated(self, request: Any, visit: Visit, begins: bool, has_room: bool) -> None:
        """A request has got room for a pass; or there was none."""
        self._unlock_given_back(request.request_id, visit)
        if not begins:
            return
        if not has_room:
            self._unlock(visit)
            return
        self.holds.remove(request.request_id)
        if visit.is_first and visit.found is not None:
            visit.is_first = False
            self.counts.prompt_tokens += request.num_tokens
            self.counts.hit_tokens += visit.found

    def _unlock_given_back(self, rid: str, visit: Visit) -> None:
        """Unlock the states of which a request does not hold the blocks any more. While it does, to evict one would
        free none, and vLLM would give its hash to it again."""
        held = []
        for lock in visit.sources:
            if self._place_of(rid, lock) is not None:
                held.append(lock)
            else:
                self.tree.unlock(lock)
        visit.sources = held

    def _place_of(self, rid: str, source: Lock) -> int | None:
        """Where a request holds a state that is locked; None: it does not."""
        table, node = self._states[0].req_to_blocks.get(rid, ()), source.node
        if node is None or node.slot is None:
            return None
        place = node.end // WORDS - 1
        return place if place < len(table) and table[place] is node.slot[0] else None

    def cached(self, request: Any, first_state: int, num_pages: int, num_states: int) -> None:
        """Blocks of a request have got a hash: its pages up to `num_pages`, its states from `first_state` on.

        What is kept of them enters the tree.
        """
        visit, rid = self._visit(request), request.request_id
        key = visit.key
        pages = [group.req_to_blocks[rid] for group in self._pages]
        start = visit.num_pages or (visit.found or 0) // self._block_size
        if visit.is_apart and any(block.block_hash is None for table in pages for block in table[:num_pages]):
            self._set_apart(rid, visit)  # the tree has let go of blocks that it uses: they cannot be found any more
            return
        tables = [group.req_to_blocks[rid] for group in self._states]
        below = visit.lock.node if visit.lock is not None else None
        node: Node | None = None
        for place in range(first_state, min(num_states, num_pages)):
            slot = tuple(table[place] for table in tables)
            if all(not block.is_null and block.block_hash is not None for block in slot):
                origin = self.visits.describe(rid, (place + 1) * WORDS, self._kind(request, place + 1))
                node = self._insert_state(key, TablePages(pages, start, place + 1), slot, origin, below, visit.options)
                if slot[0].block_hash is None:
                    self._unkept[rid] = place
                if visit.options.pin and node.slot is not None and self._is_pinned(visit.options, place + 1):
                    self._pin(rid, visit.options, node)
        end = num_pages * WORDS
        if node is None or node.end < end:
            node = self._insert(key, TablePages(pages, start, num_pages), None, below, None)
        before, visit.lock, visit.num_pages = visit.lock, self.tree.lock_pages(node, end), num_pages
        if before is not None:
            self.tree.unlock(before)
        if num_states and node.end == end and node.slot == tuple(table[num_pages - 1] for table in tables):
            visit.sources.append(self.tree.lock_state(node))

    def _insert_state(
        self,
        key: Key,
        blocks: TablePages,
        slot: tuple[Block, ...],
        origin: StateOrigin,
        below: Node | None,
        options: RequestOptions,
    ) -> Node:
        """Enter pages and the state after them, if it is worth more than what would be evicted for it."""
        end = len(blocks) * WORDS
        is_admitted = True
        asks = self._learns and self._options.admission and origin.kind is not Kind.ANCHOR and not options.pin
        if asks and not self._queue.has_spare:
            origin, is_admitted = self.visits.admit(key, end, origin, tails_help=True, priority=options.priority)
        if is_admitted:
            is_spare = origin.kind is Kind.INTERVAL and not options.pin
            checkpoint = Checkpoint(slot, end, origin.kind, options.priority, origin.turn, is_spare)
            return self._insert(key, blocks, checkpoint, below, origin)
        self.counts.refused[origin.kind.value] += 1
        for block in slot:
            self._pool._maybe_evict_cached_block(block)
        return self._insert(key, blocks, None, below, origin)

    def _insert(
        self,
        key: Key,
        blocks: TablePages,
        checkpoint: Checkpoint | None,
        below: Node | None,
        origin: StateOrigin | None,
    ) -> Node:
        past, path = (origin.past, origin.path) if origin is not None else (None, None)
        inserted = self.tree.insert(key, len(blocks) * WORDS, blocks, checkpoint, below, past, path=path)
        num_existing = inserted.num_existing // WORDS
        self._owned.update(block.block_id for block in chain.from_iterable(blocks[num_existing:]))
        if num_existing > blocks.start:
            self._take_over(inserted.node, blocks.start, blocks[blocks.start : num_existing])
        if inserted.adopted and checkpoint is not None:
            self._owned.update(block.block_id for block in checkpoint.slot)
        return inserted.node

    def _take_over(self, node: Node, start: int, computed: list[tuple[Block, ...]]) -> None:
        """Have the tree own the blocks that a request has computed again, in place of its own from block `start` on,
        where nothing uses those: they are free at once, and not when the request has ended."""
        own = self.tree.exchange_pages(node, start * WORDS, computed)
        for place, (mine, theirs) in enumerate(zip(own, computed, strict=True), start):
            if mine is theirs or mine == theirs:
                continue
            if any(block.ref_cnt for block in mine):
                self.tree.exchange_pages(node, place * WORDS, [mine])
                continue
            self._owned.update(block.block_id for block in theirs)
            self.let_go(mine)

    def let_go(self, blocks: Iterable[Block]) -> None:
        """Take their content from blocks that the tree has no more."""
        for block in blocks:
            self._owned.discard(block.block_id)
            self._pool._maybe_evict_cached_block(block)
            self._queue.let_go(block)

    def _pin(self, rid: str, options: RequestOptions, node: Node) -> None:
        """Pin a state, as far as not too much is pinned."""
        if not self._may_pin(node):
            self.counts.ended_pins += 1
            self.pins.remove_next_to_expire()
        self.pins.put(options.key or rid, node, options.pin or 0.0)

    def _is_pinned(self, options: RequestOptions, num_blocks: int) -> bool:
        """Tell whether a state after n blocks is among what a request has pinned."""
        return options.pin_tokens is None or num_blocks * self._block_size <= options.pin_tokens

    def _may_pin(self, node: Node) -> bool:
        """Tell whether a pin of a state would leave enough that is not pinned."""
        locks = self.tree.locks
        pinned = locks.num_pinned_pages * len(self._pages) + locks.num_pinned_checkpoints * len(self._states)
        return pinned + node.end // WORDS * len(self._pages) <= MAX_PINNED * self._pool.num_gpu_blocks

    def left(self, request: Any) -> None:
        """A request gives its blocks back: it has ended, or waits again."""
        self.holds.remove(request.request_id)
        visit = self._requests.pop(request.request_id, None)
        self._unkept.pop(request.request_id, None)
        if visit is not None:
            end = visit.lock.node if visit.lock is not None else None
            self._unlock(visit)
            if request.is_finished() and (visit.options.session is not None or visit.options.hints != NO_HINTS):
                self._ended(visit.options, end)
        if request.is_finished():
            self.visits.end_request(request.request_id, request.num_output_tokens)

    def _ended(self, options: RequestOptions, end: Node | None) -> None:
        """A request has ended, with its pages up to a node: do what its hints say."""
        if options.session is not None and (options.hints.release or options.hints.end_session):
            self.pins.remove(options.key or "/".join(options.session))
        self.sessions.end_request(options.session, end, options.hints)

    def evict(self, num_blocks: int) -> bool:
        """Let go of what is worth least: a state, or up to n blocks of pages that no state needs.

        Returns:
            Whether there was anything.
        """
        num_pages = ceil_div(num_blocks, len(self._pages))
        released = self.tree.evict_one(num_pages)
        if not released.pages and not released.slots:
            self._give_up()
            released = self.tree.evict_one(num_pages)
        while not released.pages and not released.slots and self._end_a_pin():
            self.counts.ended_pins += 1
            released = self.tree.evict_one(num_pages)
        found = [*chain(chain.from_iterable(released.pages.parts), released.slots)]
        self.let_go(chain.from_iterable(found))
        return bool(found)

    def _end_a_pin(self) -> bool:
        return self.holds.remove_next_to_expire() or self.pins.remove_next_to_expire()

    def _give_up(self) -> None:
        """Give up locks that protect free blocks. A request may have computed pages again that the tree has, in blocks
        of its own: those of the tree can be free below its lock."""
        for rid, visit in self._requests.items():
            self._unlock_given_back(rid, visit)
            node = visit.lock.node if visit.lock is not None else None
            if node is None:
                continue
            pages = chain.from_iterable(self.tree.pages(node, node.end).parts)
            if any(not block.ref_cnt for block in chain.from_iterable(pages)):
                self._set_apart(rid, visit)

    def _set_apart(self, rid: str, visit: Visit) -> None:
        for source in visit.sources:
            if (place := self._place_of(rid, source)) is not None:
                self._unkept[rid] = place
        self._unlock(visit)
        visit.is_apart = True
        self.counts.set_apart += 1

    def _kind(self, request: Any, num_blocks: int) -> Kind:
        """Why the state of a request after n blocks is there."""
        end, size = num_blocks * self._block_size, self._block_size
        if end > request.num_prompt_tokens:
            return Kind.TURN_END
        if request.shared_prefix_boundary // size == num_blocks:
            return Kind.BRANCH
        if end > request.num_prompt_tokens - 1 - size:
            return Kind.PROMPT_END
        return Kind.ANCHOR if self._requests[request.request_id].anchor == num_blocks else Kind.INTERVAL

    def _visit(self, request: Any) -> Visit:
        visit = self._requests.get(request.request_id)
        if visit is None:
            visit = self._requests[request.request_id] = Visit(self._options_of(request))
        hashes = request.block_hashes
        ids = visit.key.ids
        if len(hashes) * HASH_BYTES > len(ids):
            visit.key = Key(ids + b"".join([one[:HASH_BYTES] for one in hashes[len(ids) // HASH_BYTES :]]))
        return visit

    def _options_of(self, request: Any) -> RequestOptions:
        """The options of a request that has come. Without effect where they are wrong: the request is served."""
        try:
            options = options_of(request)
        except ArgumentError as error:
            self.counts.bad_options += 1
            if self.counts.bad_options <= MAX_WARNINGS:
                logger.warning("hybrid: request %s is served without its options: %s", request.request_id, error)
            return PLAIN
        if options.pin == 0:
            self.pins.remove(options.key or request.request_id)
        return options

    def _limit(self, request: Any) -> int:
        """How far a request may be found: vLLM computes the last token of each again."""
        return (request.num_tokens - 1) // self._block_size * WORDS

    def _unlock(self, visit: Visit) -> None:
        for lock in (visit.lock, *visit.sources):
            if lock is not None:
                self.tree.unlock(lock)
        visit.lock, visit.sources = None, []
