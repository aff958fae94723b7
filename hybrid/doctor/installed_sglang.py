"""SGLang's own cache, where it is installed: its tree, pools, allocators and requests on a CPU, without a model.

What is done here is what SGLang's scheduler does with its cache for each request: match and copy on write, lock,
allocate and evict, checkpoint after each part of a prefill, track states while decoding, release.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from hybrid.doctor.arrivals import Arrivals
from hybrid.doctor.batch import Begun, ReplayLoop
from hybrid.doctor.engine import EngineModel, Hit
from hybrid.doctor.request import LoggedRequest
from hybrid.doctor.sglang import PAGE, TRACK, SglangSteps, pools_of, running_of
from hybrid.doctor.sizes import Sizes

KV_BYTES = 32
"""Bytes of KV of a token, of `pools`: of one layer with a head of 8."""

CHUNK = 64
"""Tokens per chunk of the kernels for linear attention."""

MAX_CONTEXT = 1 << 18
"""Tokens of a request, at most: SGLang has a row of that many places for each that runs."""


class SglangRequests:
    """Requests on a cache of SGLang's.

    Args:
        cache: SGLang's cache.
        pool, allocator: SGLang's pools of rows and states, and of KV.
        page_size: tokens of a page.
        extra_buffer: SGLang tracks states in buffers of their own, at multiples of the chunk.
    """

    def __init__(self, cache: Any, pool: Any, allocator: Any, page_size: int = PAGE, extra_buffer: bool = True) -> None:
        self.cache, self.pool, self.allocator = cache, pool, allocator
        self._page_size, self._extra_buffer = page_size, extra_buffer
        self._number = 0

    def arrive(self, prompt: Sequence[int], priority: int = 0) -> Any:
        """A request in the queue."""
        self._number += 1
        ids = prompt if isinstance(prompt, array) else array("q", prompt)
        req = Req(
            rid=f"request-{self._number}",
            origin_input_text="",
            origin_input_ids=ids,
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
        )
        req.priority = priority
        return req

    def start(self, req: Any) -> bool:
        """Match, lock and allocate. False: there is no memory, and nothing is held."""
        req.init_next_round_input(self.cache)
        lock = self.cache.lock(req.last_node)
        length = len(req.full_untruncated_fill_ids)
        if not ensure_mamba_capacity(self.pool, [req], self.cache):
            self.cache.unlock(lock)
            release_kv_cache(req, self.cache, checkpoint=False)
            return False
        self.pool.alloc([req])
        pages = self._allocate_pages(req.prefix_len, length)
        if pages is None:
            self.cache.unlock(lock)
            self.cache.on_release(req, checkpointed=False)
            self.pool.free(req)
            return False
        req.lock = lock
        self.pool.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), self.cache.prefix_device_indices(req))
        self._write(req, req.prefix_len, length, pages)
        req.kv.mamba_cow_src_index = None  # the forward pass has copied the state
        req.kv.mamba_needs_clear = False
        return True

    def prefill(self, req: Any, end: int | None = None) -> None:
        """Compute the prompt up to a position, and give the cache what is done."""
        end = len(req.full_untruncated_fill_ids) if end is None else end
        self._track_prefill(req, max(req.prefix_len, req.kv.kv_committed_len), end)
        req.kv.kv_committed_len = end
        self.cache.checkpoint(req, up_to=end)

    def decode(self, req: Any, ids: Sequence[int]) -> bool:
        """Compute an answer. False: there is no memory for it, and nothing has changed."""
        committed = req.kv.kv_committed_len
        end = committed + len(ids)
        allocated = req.kv.kv_allocated_len
        pages = self._allocate_pages(allocated, end)
        if pages is None:
            return False
        self._write(req, allocated, end, pages)
        req.output_ids.extend(ids)
        req.kv.kv_committed_len = end
        if self._extra_buffer:
            for position in range(committed // TRACK * TRACK + TRACK, end + 1, TRACK):
                kv = req.kv
                kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, position
                kv.mamba_last_track_idx = kv.mamba_next_track_idx
                kv.mamba_next_track_idx = self.pool.get_mamba_ping_pong_other_idx(kv.mamba_last_track_idx)
        return True

    def finish(self, req: Any) -> None:
        """The request has ended: the cache keeps what it can."""
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)

    def leave(self, req: Any) -> None:
        """Take the request off its memory: nothing more of it is kept."""
        req.kv.kv_committed_len = req.kv.kv_allocated_len  # SGLang commits a part when it allocates it
        release_kv_cache(req, self.cache, checkpoint=False)

    # What the scheduler's allocation does

    def _allocate_pages(self, start: int, end: int) -> torch.Tensor | None:
        size = self._page_size
        need = (-(-end // size) - -(-start // size)) * size
        if need <= 0:
            return torch.empty(0, dtype=torch.int64)
        missing = need - self.allocator.available_size()
        if missing > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=missing))
        found: torch.Tensor | None = self.allocator.alloc(need)
        return found

    def _write(self, req: Any, start: int, end: int, pages: torch.Tensor) -> None:
        """Map new pages; positions up to the page's end are the request's already."""
        size, row = self._page_size, req.kv.req_pool_idx
        first = -(-start // size) * size
        if start < min(first, end):
            page = self.pool.req_to_token[row, first - size]
            filled = page + torch.arange(start - (first - size), min(first, end) - (first - size))
            self.pool.write((row, slice(start, min(first, end))), filled.to(torch.int32))
        if first < end:
            self.pool.write((row, slice(first, end)), pages[: end - first].to(torch.int32))
        req.kv.kv_allocated_len = end

    def _track_prefill(self, req: Any, start: int, end: int) -> None:
        """Note which state a part of a prefill leaves in the request's buffers."""
        if not self._extra_buffer or end - start < CHUNK:
            return
        grid = max(CHUNK, self._page_size)
        kv, position = req.kv, start + (end - start) // grid * grid
        branch = req.mamba_branching_seqlen
        if branch is not None and start < branch < position + (position == end) and (branch - start) % CHUNK == 0:
            position = branch
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_last_track_seqlen = position


class SglangOwnRunning:
    """A request that runs on SGLang's cache.

    Attributes:
        request, req, ids: what it is, in traffic and in SGLang, and its tokens.
        hit, computed: as of every running request.
    """

    __slots__ = ("computed", "hit", "ids", "req", "request")

    def __init__(self, request: LoggedRequest, req: Any, ids: array[int]) -> None:
        self.request: LoggedRequest = request
        self.req: Any = req
        self.ids: array[int] = ids
        self.computed: int = req.prefix_len
        self.hit = Hit(req.prefix_len, max(req.prefix_len, req.mamba_branching_seqlen or 0))


class InstalledSglang(SglangSteps):
    """SGLang's cache, as it is installed, and a loop of steps that serves requests on it. Pages are named by the hashes
    of traffic in place of token ids.

    Args:
        sizes: of the model.
        memory: bytes of pages and states together.
        arrivals: the requests as they come.
        endless: the model of it with endless memory, which follows step by step.
        given: arguments of SGLang's server.

    Attributes:
        cache: SGLang's.
    """

    def __init__(
        self, sizes: Sizes, memory: int, arrivals: Arrivals, endless: EngineModel | None = None, **given: Any
    ) -> None:
        slots, pages = pools_of(sizes, memory)
        self.max_running, tokens = running_of(slots), pages * PAGE
        self._context = min(tokens, MAX_CONTEXT)
        args = server_args(PAGE, **given)
        ratio = sizes.state_bytes / sizes.token_bytes
        pool, allocator = pools(tokens, slots, self.max_running, self._context + PAGE, state_tokens=ratio)
        self.cache: Any = create_tree_cache(context_of(args, params_of(pool, allocator)))
        self._requests = SglangRequests(self.cache, pool, allocator)
        self._loop = ReplayLoop(self, arrivals, endless)

    def run(self) -> Iterator[Begun]:
        """Serve all requests; each is given when it begins."""
        return self._loop.run()

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        running = self.begin(request)
        if running is None:
            return Hit(0, 0)
        while running.computed < request.num_prompt:
            self.advance(running, self.end_of_part(running, self.part))
        self.advance(running, max(request.num_prompt, request.num_tokens - 1))
        self.end(running)
        return running.hit

    def begin(self, request: LoggedRequest, budget: int | None = None) -> SglangOwnRunning | None:
        """Find a request's prompt, lock what is found, and take pages for the rest of it and slots for its states."""
        if (budget is not None and budget < PAGE) or request.num_tokens > self._context:
            return None
        blocks = request.blocks(PAGE, request.num_tokens)
        tokens = np.ones(request.num_tokens, np.int64)
        tokens[: len(blocks) * PAGE : PAGE] = np.array(blocks, np.uint64) >> np.uint64(2)  # the rest may be all alike
        ids = array("q", tokens.tobytes())
        req = self._requests.arrive(ids[: request.num_prompt])
        return SglangOwnRunning(request, req, ids) if self._requests.start(req) else None

    def advance(self, running: SglangOwnRunning, end: int) -> bool:
        """Compute a part of a prompt, or tokens of an answer and the place of the next."""
        if end > running.request.num_prompt:
            if not self._requests.decode(running.req, running.ids[running.req.kv.kv_committed_len : end + 1]):
                return False
        elif end > running.computed:
            self._requests.prefill(running.req, end)
        running.computed = end
        return True

    def end(self, running: SglangOwnRunning) -> None:
        """Give up what a request holds; of an answer that has ended the tree keeps what has a state at its end."""
        if running.computed >= max(running.request.num_prompt, running.request.num_tokens - 1):
            self._requests.finish(running.req)
        else:
            self._requests.leave(running.req)


def server_args(page_size: int, policy: str | None = None, **given: Any) -> ServerArgs:
    """Server arguments, made known to SGLang as a server would.

    Args:
        policy: of `--radix-eviction-policy`; None: not given.
        given: other arguments.
    """
    reset_context()
    if policy is not None:
        given["radix_eviction_policy"] = policy
    args = ServerArgs(model_path="dummy", device="cpu", page_size=page_size, mamba_track_interval=TRACK, **given)
    args._radix_eviction_policy_explicitly_set = policy is not None
    args._mamba_cache_chunk_size = max(CHUNK, page_size)
    publish(args, role="scheduler")
    return args


def params_of(pool: Any, allocator: Any, page_size: int = PAGE, **given: Any) -> CacheInitParams:
    """Return what SGLang builds a cache of, on its pools."""
    given = {"eviction_policy": "lru", "enable_mamba_extra_buffer": True, **given}
    return CacheInitParams(
        disable=False,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        **given,
    )


def context_of(args: ServerArgs, params: CacheInitParams, **changed: Any) -> TreeCacheBuildContext:
    """Return what SGLang hands to the factory of a cache."""
    fields: dict[str, Any] = {
        "server_args": args,
        "params": params,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": True,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
        "tp_worker": None,
        "model_config": None,
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": None,
    }
    return TreeCacheBuildContext(**{**fields, **changed})


def pools(
    tokens: int,
    states: int,
    rows: int,
    context: int,
    page_size: int = PAGE,
    extra_buffer: bool = True,
    *,
    state_tokens: float,
) -> tuple[Any, Any]:
    """SGLang's pools, with KV of a few bytes, and states in the model's proportion to it.

    Args:
        tokens, states: that they hold.
        rows: requests that run at a time, at most; context: tokens of each.
        state_tokens: tokens whose KV is as large as a state.

    Returns:
        The pool of rows and states, and the allocator of KV.
    """
    size = max(1, round((state_tokens * KV_BYTES - 256) / 516))  # 512 bytes of the state for each, and 4 of the window
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=128, n_groups=1, num_heads=4, head_dim=32, state_size=size, conv_kernel=2
    )
    pool = HybridReqToTokenPool(
        size=rows,
        mamba_size=states,
        mamba_spec_state_size=rows,
        max_context_len=context,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=extra_buffer,
        speculative_num_draft_tokens=None,
    )
    kv = HybridLinearKVPool(
        size=tokens,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=[1],
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=pool.mamba_pool,
    )
    paged = {"page_size": page_size} if page_size > 1 else {}
    make = PagedTokenToKVPoolAllocator if paged else TokenToKVPoolAllocator
    return pool, make(size=tokens, dtype=torch.bfloat16, device="cpu", kvcache=kv, need_sort=False, **paged)
