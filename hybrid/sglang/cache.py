"""SGLang's unified cache with eviction by this project's tree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictResult
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from hybrid.sglang.tree_core import Evicted

FULL, STATE = ComponentType.FULL, ComponentType.MAMBA

Satisfied = Callable[[], bool]


class HybridRadixCache(UnifiedRadixCache):
    """As SGLang's, and so for all of SGLang an instance of it; but what is evicted is decided in one call, which knows
    how much is needed."""

    @rank_consensus(same_params=True, same_results=True)
    def evict(self, params: Any) -> Any:
        """Evict tokens and states, as many as are asked for if possible."""
        if self.disable:
            return EvictResult()
        started, result = time.perf_counter(), EvictResult()
        if params.num_tokens > 0:
            self._take(self.tree_core.evict_pages(params.num_tokens), result)
        if params.mamba_num > result.mamba_num_evicted:
            self._take(self.tree_core.evict_states(params.mamba_num - result.mamba_num_evicted), result)
        self.update_eviction_metrics(result.num_tokens_evicted, started)
        return result

    @rank_consensus(same_params=["params", "allocation_reclaim_satisfied is not None"], same_results=True)
    def evict_for_alloc(self, params: Any, *, allocation_reclaim_satisfied: Satisfied | None = None) -> Any:
        """Evict until there are as many tokens and states more as are asked for, or until an allocation is satisfied.

        Where KV and states share one memory, what is evicted is what is worth least of both.
        """
        if self.disable:
            return EvictResult()
        started, result = time.perf_counter(), EvictResult()
        if allocation_reclaim_satisfied is not None:
            self._evict_until(allocation_reclaim_satisfied, params, result)
        elif self.token_to_kv_pool_allocator.mamba_full_cache_donor() is None:
            self._evict_apart(params, result)
        else:
            self._evict_shared(params, result)
        self.update_eviction_metrics(result.num_tokens_evicted, started)
        return result

    def touch_prefix(self, key: Any) -> None:
        """SGLang refreshes what waiting requests will use. Here a use counts once per request, when it starts."""

    def _evict_apart(self, params: Any, result: Any) -> None:
        """Two memories: pages for tokens, then states, as many as the pages have not brought along."""
        tokens, states = self.token_to_kv_pool_allocator, self.req_to_token_pool.mamba_allocator
        wanted_tokens = tokens.available_size() + params.num_tokens
        wanted_states = states.schedulable_available_size() + params.mamba_num
        while params.num_tokens > 0 and (missing := wanted_tokens - tokens.available_size()) > 0:
            if not self._take(self.tree_core.evict_pages(missing), result):
                break
        missing = wanted_states - states.schedulable_available_size()
        if params.mamba_num > 0 and missing > 0:
            self._take(self.tree_core.evict_states(missing), result)

    def _evict_shared(self, params: Any, result: Any) -> None:
        """One memory: whatever is worth least, until both fit. Only the ids of states are apart."""
        tokens, states = self.token_to_kv_pool_allocator, self.req_to_token_pool.mamba_allocator
        donor = tokens.mamba_full_cache_donor()
        wanted_tokens = tokens.available_size() + params.num_tokens if params.num_tokens > 0 else 0
        wanted_states = states.schedulable_available_size() + params.mamba_num if params.mamba_num > 0 else 0
        while True:
            if wanted_states:
                donor.prepare_mamba_allocation(wanted_states)
            missing = wanted_tokens - tokens.available_size()
            missing_states = wanted_states - states.schedulable_available_size()
            if states.available_size() < wanted_states:
                evicted = self.tree_core.evict_states(wanted_states - states.available_size())
            elif missing > 0 or missing_states > 0:
                evicted = self.tree_core.evict_least(max(missing, missing_states * donor.mamba_slot_full_token_cost()))
            else:
                return
            if not self._take(evicted, result):
                return

    def _evict_until(self, satisfied: Satisfied, params: Any, result: Any) -> None:
        """Evict one by one, up to as many as are asked for."""
        while not satisfied():
            if result.num_tokens_evicted < params.num_tokens:
                evicted = self.tree_core.evict_pages(1)
            elif result.mamba_num_evicted < params.mamba_num:
                evicted = self.tree_core.evict_states(1)
            else:
                return
            if not self._take(evicted, result):
                return

    def _take(self, evicted: Evicted, result: Any) -> bool:
        """Free what was evicted, and count it. Returns whether it is anything."""
        if evicted.indices:
            self._free(FULL, evicted.indices)
            result.num_tokens_evicted += evicted.num_tokens
        if evicted.slots:
            self._free(STATE, evicted.slots)
            result.mamba_num_evicted += len(evicted.slots)
        return bool(evicted.indices or evicted.slots)

    def _free(self, component_type: Any, indices: list[torch.Tensor]) -> None:
        action = FreeComponentDeviceSlot(indices, component_type=component_type)
        self.components[component_type].apply_component_action(action)
