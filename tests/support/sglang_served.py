"""Requests through SGLang's own pools, allocators, request objects and release paths, without a model and a server.

`Served` is what `hybrid doctor` replays on, with settings, counts and books. All that owns or frees memory is SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.server_args import ServerArgs

from hybrid.doctor import installed_sglang
from hybrid.doctor.installed_sglang import SglangRequests, context_of

KV_BYTES, STATE_BYTES = 32768, 51_511_296
"""Bytes of KV per token, and of a state, of the Qwen3.5-4B shape."""

SCALE = 1024
"""Pools that share a memory are that many times smaller, at the same proportion of the two."""


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


class Served(SglangRequests):
    """A cache with its pools, and the requests that use it.

    Attributes:
        cache: SGLang's cache.
        allocator, pool: SGLang's pools of KV, and of rows and states.
        hit_tokens, prompt_tokens: of all requests so far.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.args = server_args(setting)
        size, buffer = setting.page_size, setting.extra_buffer
        self.pool, self.allocator = _unified_pools(setting) if setting.unified else _fixed_pools(setting)
        super().__init__(
            create_tree_cache(context_of(self.args, self.params())), self.pool, self.allocator, size, buffer
        )
        self.hit_tokens = self.prompt_tokens = 0

    def params(self) -> CacheInitParams:
        setting = self.setting
        return installed_sglang.params_of(
            self.pool,
            self.allocator,
            setting.page_size,
            eviction_policy=setting.policy or "lru",
            eviction_policy_config=setting.config,
            enable_mamba_extra_buffer=setting.extra_buffer,
            tree_core_backend=None if setting.backend == "hybrid" else setting.backend,
        )

    def start(self, req: Any) -> bool:
        started = super().start(req)
        if started:
            self.hit_tokens += req.prefix_len
            self.prompt_tokens += len(req.full_untruncated_fill_ids)
        return started

    def abort(self, req: Any) -> None:
        """The request has gone: nothing more of it is kept."""
        req.finished_reason = FINISH_ABORT()
        self.leave(req)

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
    backend = BACKEND if setting.backend == BACKEND else None
    return installed_sglang.server_args(
        setting.page_size, setting.policy, radix_cache_backend=backend, enable_unified_memory=setting.unified
    )


def _state_params(layers: list[int]) -> Mamba2CacheParams:
    """A state of about `STATE_BYTES / SCALE` bytes, next to `KV_BYTES / SCALE` bytes of KV per token."""
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=128, n_groups=1, num_heads=4, head_dim=32, state_size=192, conv_kernel=2
        )
        return Mamba2CacheParams(shape=shape, layers=layers)


def _fixed_pools(setting: Setting) -> tuple[Any, Any]:
    sizes = setting.tokens, setting.states, setting.requests, setting.context, setting.page_size
    return installed_sglang.pools(*sizes, setting.extra_buffer, state_tokens=STATE_BYTES / KV_BYTES)


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
