"""Our cache without contents: its own bookkeeping serves the requests of traffic."""

from __future__ import annotations

import numpy as np

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.doctor.engine import MISS, Hit
from hybrid.doctor.request import UNIT, LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.key import TOKEN_BYTES, Key, common_prefix
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Kind
from hybrid.tree.policy import Policy
from hybrid.units import ceil_div

PAGE = 64
"""Tokens of a page."""


class OwnRunning:
    """A request that runs.

    Attributes:
        request, lease: what it is, and what it holds.
        hit: what of its prompt was cached.
        computed: tokens that are there.
    """

    __slots__ = ("computed", "hit", "lease", "request")

    def __init__(self, request: LoggedRequest, lease: Lease) -> None:
        self.request, self.lease = request, lease
        self.computed = lease.num_hit_tokens * UNIT
        self.hit = Hit(self.computed, lease.explanation.page_hit * UNIT)


class OwnCache:
    """Our cache.

    A page's hashes stand for its tokens: a page is as many ids of 32 bits as it has hashes, so that all positions are
    those of tokens divided by `UNIT`.

    Args:
        sizes: of the model.
        memory: bytes of pages and states, or what is endless.
        eviction: the policy, as in `CacheConfig`.

    Raises:
        MemoryBudgetError: the memory does not hold a page and the states of one request.
    """

    mixes = True
    shares_at_once = False

    def __init__(self, sizes: Sizes, memory: Memory, *, eviction: str | Policy = "lhd") -> None:
        page = PAGE // UNIT
        config = CacheConfig(page_size=page, chunk_size=page, eviction=eviction)
        if isinstance(memory, Endless):
            num_pages = 2 * memory.num_tokens // PAGE + 1024  # more than half is free: states are put everywhere
            indices = CacheMemory.of_indices(num_pages, num_pages)
        else:
            indices = CacheMemory.of_bytes(memory, PAGE * sizes.token_bytes, sizes.state_bytes or 64)
        self._cache = HybridCache(indices, config)
        self._prompts: list[OwnRunning] = []  # requests whose prompts are not computed yet

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        hit, pages = serve(
            self._cache, _key_of(request), ceil_div(request.num_prompt, UNIT), request.num_tokens // UNIT
        )
        return Hit(hit * UNIT, pages * UNIT)

    def new_step(self) -> None:
        """A step begins."""

    def begin(self, request: LoggedRequest, budget: int | None = None) -> OwnRunning | None:
        """Open a request, and take slots for the states of its prompt. It waits for one that is about to compute more
        of its prompt than is there."""
        key, num_input = _key_of(request), ceil_div(request.num_prompt, UNIT)
        if budget is not None and (budget < PAGE or self._wait(key, num_input)):
            return None
        lease = opened(self._cache, key, num_input)
        if lease is None:
            return None
        running = OwnRunning(request, lease)
        self._prompts.append(running)
        return running

    def _wait(self, key: Key, num_input: int) -> bool:
        """Return whether a request waits for one that runs, which leaves a state where they part."""
        grid, usable = self._cache.config.grid, self._cache.tree.peek(key, num_input - 1).num_tokens
        for other in self._prompts:
            most = min(num_input - 1, ceil_div(other.request.num_prompt, UNIT)) * TOKEN_BYTES
            there = other.lease
            if there.key.namespace != key.namespace:
                continue
            shared = common_prefix(key.ids, there.key.ids, 0, 0, grid * TOKEN_BYTES, most) // TOKEN_BYTES
            if shared > usable and other.computed < shared * UNIT:
                if not there.captures(shared):
                    self._cache.capture(there, shared, Kind.BRANCH)
                return True
        return False

    def end_of_part(self, running: OwnRunning, budget: int) -> int:
        """Where the next part of its prompt ends: at a page, or at its end."""
        start, num_prompt = running.computed, running.request.num_prompt
        return num_prompt if num_prompt - start <= budget else (start + budget) // PAGE * PAGE

    def next_event(self, running: OwnRunning) -> int:
        """The token with which its answer takes a page more."""
        return running.computed // PAGE * PAGE + PAGE

    def advance(self, running: OwnRunning, end: int) -> bool:
        """Compute a part of a prompt, which the tree then has, or tokens of an answer."""
        cache, lease, request = self._cache, running.lease, running.request
        if end <= request.num_prompt:
            if end > running.computed:
                units = ceil_div(end, UNIT)
                cache.advance(lease, units)
                cache.commit(lease, lease.key, units // cache.config.grid * cache.config.grid)
        elif not cache.reserve(lease, min(end // UNIT + 1, len(lease.key))):
            return False
        running.computed = end
        if end >= request.num_prompt and running in self._prompts:
            self._prompts.remove(running)
        return True

    def end(self, running: OwnRunning) -> None:
        """Close a request; the tree keeps an answer that has ended."""
        request, lease = running.request, running.lease
        if running.computed >= max(request.num_prompt, request.num_tokens - 1):
            answered(self._cache, lease, ceil_div(request.num_prompt, UNIT), request.num_tokens // UNIT)
        elif running in self._prompts:
            self._prompts.remove(running)
        self._cache.close(lease)


def _key_of(request: LoggedRequest) -> Key:
    ids = np.frombuffer(request.hashes, np.uint64).astype(np.uint32)  # the lower half of each
    return Key(ids.tobytes(), request.namespace)


def opened(cache: HybridCache, key: Key, num_input: int) -> Lease | None:
    """Open a request, and capture the states of its prompt. None: it could not have its memory."""
    grid, names = cache.config.grid, cache.config.placement
    lease = cache.open(key, num_input - 1, num_input)
    if lease is None:
        return None
    hit = lease.num_hit_tokens
    wanted = placement.of_prompt(
        names, num_input, grid, branching_len=lease.branching_len, shared=(), declared=(), is_replay=False
    )
    for position, kind in wanted.items():
        if position > hit:
            cache.capture(lease, position, kind)
    if "geometric" in names:
        for position in placement.spare(hit, num_input, grid, cache.memory.free_state_share):
            if position not in wanted and cache.capture_spare(lease, position) is None:
                break
    return lease


def answered(cache: HybridCache, lease: Lease, num_input: int, num_whole: int) -> None:
    """Keep an answer whose pages a request has, and the state at its end.

    Args:
        num_input: tokens of the prompt.
        num_whole: tokens of the key that are whole.
    """
    grid, names, length = cache.config.grid, cache.config.placement, len(lease.key)
    whole = num_whole // grid * grid
    if "turn_end" in names and whole > num_input:
        cache.capture(lease, whole, Kind.TURN_END)
    cache.advance(lease, length)
    cache.commit(lease, lease.key, whole)
    if "turn_end" in names:
        cache.end_turn(lease, length)


def serve(cache: HybridCache, key: Key, num_input: int, num_whole: int | None = None) -> tuple[int, int]:
    """Serve one request from its prompt to its last token, as the engine does.

    Args:
        key: of its prompt and its answer.
        num_input: tokens of the prompt.
        num_whole: tokens of the key that are whole; None: all.

    Returns:
        Its usable hit and its page hit, 0 when it could not have its memory.
    """
    grid = cache.config.grid
    lease = opened(cache, key, num_input)
    if lease is None:
        return MISS
    hit, pages = lease.num_hit_tokens, lease.explanation.page_hit
    cache.advance(lease, num_input)
    cache.commit(lease, key, num_input // grid * grid)
    if cache.reserve(lease, len(key)):
        answered(cache, lease, num_input, len(key) if num_whole is None else num_whole)
    cache.close(lease)
    return hit, pages
