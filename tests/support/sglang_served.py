"""Requests through SGLang's own pools, allocators, request objects and release paths, without a model and a server.

`Served` does what SGLang's scheduler does with its cache for each request: match and copy on write, lock, allocate and
evict, checkpoint after each part of a prefill, track states while decoding, release. All that owns or frees memory is
SGLang's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

CHUNK = 64
"""Tokens per chunk of the linear-attention kernels."""

TRACK = 256
"""Tokens between two states that are tracked while decoding."""

KV_BYTES, STATE_BYTES = 32768, 51_511_296
"""Bytes of KV per token, and of a state, of the Qwen3.5-4B shape."""

SCALE = 1024
"""The pools are that many times smaller, at the same proportion of the two."""


@dataclass(frozen=True)
class Setting:
    """A cache and its pools.

    Attributes:
        backend: "hybrid", or a tree core of SGLang's.
        policy: of `--radix-eviction-policy`; None: not given.
        tokens, states: of the fixed pools, or as many bytes shared.
        extra_buffer: SGLang tracks states in buffers of their own, at multiples of the chunk.
        unified: KV and states share one memory.
        config: of `--radix-eviction-policy-config`.
    """

    backend: str = "hybrid"
    policy: str | None = None
    tokens: int = 4096
    states: int = 24
    page_size: int = 64
    extra_buffer: bool = True
    unified: bool = False
    requests: int = 8
    context: int = 65536
    config: dict[str, Any] | None = None


def budget(gigabytes: float, page_size: int) -> tuple[int, int]:
    """Tokens and states as SGLang divides a memory by default: 0.9 as much for states as for KV."""
    states = gigabytes * 1e9 * 0.9 / 1.9
    tokens = (gigabytes * 1e9 - states) / KV_BYTES
    return int(tokens) // page_size * page_size, int(states / STATE_BYTES)


class Served:
    """A cache with its pools, and the requests that use it.

    Attributes:
        cache: SGLang's cache.
        allocator, pool: SGLang's pools of KV, and of rows and states.
        hit_tokens, prompt_tokens: of all requests so far.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.args = server_args(setting)
        build = _unified_pools if setting.unified else _fixed_pools
        self.pool, self.allocator = build(setting)
        self.cache = create_tree_cache(context_of(self.args, self.params()))
        self.hit_tokens = self.prompt_tokens = 0
        self._number = 0

    def params(self) -> CacheInitParams:
        setting = self.setting
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=setting.page_size,
            eviction_policy=setting.policy or "lru",
            eviction_policy_config=setting.config,
            enable_mamba_extra_buffer=setting.extra_buffer,
            tree_core_backend=None if setting.backend == "hybrid" else setting.backend,
        )

    # The life of a request

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
        self.hit_tokens += req.prefix_len
        self.prompt_tokens += length
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
        if self.setting.extra_buffer:
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

    def abort(self, req: Any) -> None:
        """The request has gone: nothing more of it is kept."""
        req.finished_reason = FINISH_ABORT()
        req.kv.kv_committed_len = req.kv.kv_allocated_len  # SGLang commits a part when it allocates it
        release_kv_cache(req, self.cache, checkpoint=False)

    def retract(self, req: Any) -> None:
        """Take the request off its memory; it can be started again."""
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()

    def serve(self, ids: Sequence[int], num_prompt: int, part: int = 1 << 20) -> int:
        """One request from its prompt, up to `part` tokens at a time, to its last token. Returns its hit."""
        req = self.arrive(ids[:num_prompt])
        if not self.start(req):
            self.prompt_tokens += num_prompt
            return 0
        hit: int = req.prefix_len
        for end in (*range(hit + part, num_prompt, part), num_prompt):
            self.prefill(req, end)
        self.decode(req, ids[num_prompt:])
        self.finish(req)
        return hit

    # What the scheduler's allocation does

    def _allocate_pages(self, start: int, end: int) -> torch.Tensor | None:
        size = self.setting.page_size
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
        size, row = self.setting.page_size, req.kv.req_pool_idx
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
        if not self.setting.extra_buffer or end - start < CHUNK:
            return
        grid = max(CHUNK, self.setting.page_size)
        kv, position = req.kv, start + (end - start) // grid * grid
        branch = req.mamba_branching_seqlen
        if branch is not None and start < branch < position + (position == end) and (branch - start) % CHUNK == 0:
            position = branch
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_last_track_seqlen = position

    # The books

    def books(self, requests: Sequence[Any] = ()) -> list[str]:
        """Return what SGLang's own invariant checker would call a leak: what is free, what the tree holds and what
        requests hold must be all there is."""
        wrong = []
        cache, size = self.cache, self.setting.page_size
        private = sum(
            -(-req.kv.kv_allocated_len // size) * size - req.kv.cache_protected_len
            for req in requests
            if req.kv.holds_kv
        )
        held = self.allocator.available_size() + cache.full_evictable_size() + cache.full_protected_size() + private
        if held != self.allocator.size:
            wrong.append(f"KV: {held} of {self.allocator.size} tokens")
        states = self.pool.mamba_allocator
        buffers = [req.kv.mamba_ping_pong_track_buffer for req in requests]
        slots = sum(req.kv.holds_mamba for req in requests) + sum(
            len(buffer) for buffer in buffers if buffer is not None
        )
        held = states.available_size() + cache.mamba_evictable_size() + cache.mamba_protected_size() + slots
        if held != states.size:
            wrong.append(f"states: {held} of {states.size}")
        return wrong


def server_args(setting: Setting) -> ServerArgs:
    """Server arguments, made known to SGLang as a server would."""
    from hybrid.sglang.plugin import BACKEND, register

    register()
    reset_context()
    given = {} if setting.policy is None else {"radix_eviction_policy": setting.policy}
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=setting.page_size,
        radix_cache_backend=BACKEND if setting.backend == BACKEND else None,
        mamba_track_interval=TRACK,
        enable_unified_memory=setting.unified,
        **given,
    )
    args._radix_eviction_policy_explicitly_set = setting.policy is not None
    args._mamba_cache_chunk_size = max(CHUNK, setting.page_size)
    publish(args, role="scheduler")
    return args


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


def _state_params(layers: list[int]) -> Mamba2CacheParams:
    """A state of about `STATE_BYTES / SCALE` bytes, next to `KV_BYTES / SCALE` bytes of KV per token."""
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=128, n_groups=1, num_heads=4, head_dim=32, state_size=192, conv_kernel=2
        )
        return Mamba2CacheParams(shape=shape, layers=layers)


def _fixed_pools(setting: Setting) -> tuple[Any, Any]:
    pool = HybridReqToTokenPool(
        size=setting.requests,
        mamba_size=setting.states,
        mamba_spec_state_size=setting.requests,
        max_context_len=setting.context,
        device="cpu",
        enable_memory_saver=False,
        cache_params=_state_params([0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=setting.extra_buffer,
        speculative_num_draft_tokens=None,
    )
    kv = HybridLinearKVPool(
        size=setting.tokens,
        dtype=torch.bfloat16,
        page_size=setting.page_size,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=[1],
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=pool.mamba_pool,
    )
    paged = {"page_size": setting.page_size} if setting.page_size > 1 else {}
    make = PagedTokenToKVPoolAllocator if paged else TokenToKVPoolAllocator
    return pool, make(size=setting.tokens, dtype=torch.bfloat16, device="cpu", kvcache=kv, need_sort=False, **paged)


def _unified_pools(setting: Setting) -> tuple[Any, Any]:
    known = signature(init_unified_mamba_pools).parameters
    of_values = {"v_head_dim": 8} if "v_head_dim" in known else {}  # since 0.5.23
    bundle = init_unified_mamba_pools(
        device="cpu",
        kv_cache_dtype=torch.bfloat16,
        head_num=1,
        head_dim=8,
        **of_values,
        page_size=setting.page_size,
        start_layer=0,
        end_layer=2,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=[0],
        full_attention_layer_ids=[1],
        mamba2_cache_params=_state_params([0]),
        model_context_len=setting.context,
        extra_max_context_len=8,
        max_total_num_tokens=setting.tokens,
        max_mamba_cache_size=setting.states,
        max_num_reqs=setting.requests,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=setting.extra_buffer,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=True,
        need_sort=False,
    )
    return bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator
