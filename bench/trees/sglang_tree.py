"""SGLang's hybrid radix cache (0.5.23, its Rust or its Python core) behind the interface of `operations.py`.

Of SGLang only the tree runs here, in the environment that `make sglang` makes. Packages that its modules import for
other parts of it are imitated where they are not installed. Chunks have 64 tokens, as ours.
"""

from __future__ import annotations

import importlib
import logging
import math
import runpy
import sys
from array import array
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from slots import Ids, Slots

CHUNK = 64
absent = runpy.run_path(str(Path(__file__).parents[2] / "hybrid/doctor/absent_packages.py"))  # our package is not here
sys.meta_path.insert(0, absent["AbsentFinder"]())
logging.disable(logging.WARNING)

import sglang.srt.mem_cache.unified_cache.components.mamba as mamba  # noqa: E402
import sglang.srt.mem_cache.unified_radix_cache as cache  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402


class TokenIndices:
    """Slots as SGLang keeps them: tensors with an index for each token."""

    device = "cpu"

    def __init__(self, size: int, page: int = 1) -> None:
        self.page, self._sizes = page, (size, page)
        self.clear()

    def clear(self) -> None:
        """Everything is free."""
        self._slots = Slots(*self._sizes)
        self.size, self.available_size = self._slots.size, self._slots.available_size
        self.schedulable_available_size = self.available_size

    def alloc(self, need: int) -> torch.Tensor | None:
        pages: Ids | None = self._slots.alloc(need)
        if pages is None:
            return None
        return torch.from_numpy((pages[:, None] * self.page + np.arange(self.page)).reshape(-1)[:need])

    def free(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self._slots.free(np.asarray(indices)[:: self.page] // self.page)

    free_segment = free_full_segment = free

    def mamba_full_cache_donor(self) -> None:
        return None


def without_a_server(module: ModuleType) -> None:
    """Give a module the settings that it otherwise asks a running server for."""
    limits = SimpleNamespace(
        mamba_max_states_per_path=-1, enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=False
    )
    settings = {
        "mamba_cache_chunk_size": lambda: CHUNK,
        "mamba_checkpoint_grid": lambda page: math.lcm(CHUNK, page),
        "get_exec": lambda: SimpleNamespace(mamba=limits),
    }
    for name, value in settings.items():
        if name in vars(module):
            setattr(module, name, value)


class SGLangTree:
    """One cache of SGLang. Its KV indices are one for each token."""

    unit = 1
    joined = staticmethod(torch.cat)

    def __init__(self, core: str, page_size: int, kv_slots: int, state_slots: int) -> None:
        without_a_server(mamba)
        if core == "rust":
            without_a_server(importlib.import_module("sglang.srt.mem_cache.rust_tree_core.adapter"))
        self.page = page_size
        self.kv, self.st = TokenIndices(kv_slots, page_size), TokenIndices(state_slots)
        pool = object.__new__(HybridReqToTokenPool)
        pool.mamba_allocator, pool.mamba_ckpt_pool = self.st, None
        cache.page_interleave_shard_size = lambda _: 1
        self._cache = cache.UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=self.kv,
                page_size=page_size,
                enable_mamba_extra_buffer=True,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                tree_core_backend=core,
            )
        )
        self._core = self._cache.tree_core
        assert type(self._core).__name__.lower().startswith("rust") == (core == "rust")

    def key(self, tokens: array[int]) -> array[int]:
        return tokens

    def match(self, key: array[int], num_tokens: int) -> tuple[int, Any, int | None]:
        found = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(key, limit=num_tokens)))
        return found.device_prefix_len, found.last_device_node, found.mamba_branching_seqlen

    def indices(self, node: Any) -> Any:
        return self._core.collect_full_device_indices(node, self._core.root_node_handle())

    def insert(self, key: array[int], num_tokens: int, kv: Any, state: Any, previous: int) -> tuple[int, Any, bool]:
        done = self._cache.insert(
            InsertParams(key=RadixKey(key[:num_tokens]), value=kv, mamba_value=state, prev_prefix_len=previous)
        )
        return done.prefix_len, done.last_device_node, not done.mamba_exist

    def lock(self, node: Any) -> Any:
        return self._cache.inc_lock_ref(node)

    def unlock(self, node: Any, receipt: Any) -> None:
        self._cache.dec_lock_ref(node, receipt.to_dec_params())

    def evict(self, num_tokens: int, num_states: int) -> tuple[int, int]:
        done = self._cache.evict(EvictParams(num_tokens=num_tokens, mamba_num=num_states))
        return done.num_tokens_evicted, done.mamba_num_evicted

    def evict_for_alloc(self, num_tokens: int, num_states: int) -> tuple[int, int]:
        done = self._cache.evict_for_alloc(EvictParams(num_tokens=num_tokens, mamba_num=num_states))
        return done.num_tokens_evicted, done.mamba_num_evicted

    def check(self) -> None:
        core = self._core
        core.sanity_check([], [])
        held = core.full_evictable_size() + core.full_protected_size()
        assert held + self.kv.available_size() == self.kv.size
        held = core.mamba_evictable_size() + core.mamba_protected_size()
        assert held + self.st.available_size() == self.st.size


def rust(**sizes: int) -> SGLangTree:
    """SGLang's Rust core."""
    return SGLangTree("rust", **sizes)


def python(**sizes: int) -> SGLangTree:
    """SGLang's Python core."""
    return SGLangTree("python", **sizes)
