"""SGLang's unified cache around this project's tree: its cache and its component of states, with this project's
eviction and admission, and how they are built."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictResult
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from hybrid.hints import NO_HINTS, hints_of, note_ignored, session_of
from hybrid.mirror.visits import Expected, StateOrigin
from hybrid.sglang.installed import PARAMETERS, refuse_missing, refuse_other_parts, refuse_uncalled
from hybrid.sglang.options import DEFAULT, Options, policy_named, refuse_unsupported
from hybrid.sglang.plugin import BACKEND
from hybrid.sglang.tree_core import Evicted, HybridTreeCore
from hybrid.sglang.values import WORDS, key_of_ids
from hybrid.tree.node import Kind

FULL, STATE = ComponentType.FULL, ComponentType.MAMBA

Satisfied = Callable[[], bool]


def build(context: Any) -> Any:
    """The cache of a scheduler.

    Args:
        context: SGLang's `TreeCacheBuildContext`. Its parameters are set to this project's tree core and component.

    Raises:
        VersionError: SGLang would not call what this backend overrides, or has not built its cache of it.
        UnsupportedModelError: the model or an option is not supported.
        ArgumentError: the policy or its configuration is unknown.
    """
    params = context.params
    refuse_uncalled(HybridRadixCache, UnifiedRadixCache)
    refuse_uncalled(StateComponent, MambaComponent, own=("admit",))
    refuse_uncalled(HybridTreeCore, UnifiedTreeCoreInterface, own=("evict_pages", "evict_states", "evict_least"))
    refuse_missing(params, PARAMETERS, "so a cache cannot be asked for")
    if context.disable_radix_cache:
        return create_unified_radix_cache(context)
    refuse_unsupported(context, params, get_exec().mamba.mamba_max_states_per_path)
    if not context.server_args._radix_eviction_policy_explicitly_set:
        params.eviction_policy = DEFAULT
    policy_named(params.eviction_policy)
    Options.of(params.eviction_policy_config)
    register_tree_core()
    params.tree_core_backend = BACKEND
    params.component_registry_override = {**(params.component_registry_override or {}), STATE: StateComponent}
    cache = create_unified_radix_cache(context, cache_class=HybridRadixCache)
    refuse_other_parts(
        {
            "its cache": (cache, HybridRadixCache),
            "its tree core": (cache.tree_core, HybridTreeCore),
            "its component of states": (cache.components[STATE], StateComponent),
        }
    )
    if context.server_args.tp_size * context.server_args.pp_size == 1:  # else all ranks must choose the same victims
        cache.tree_core.clock = time.monotonic
    return cache


def register_tree_core() -> None:
    """Make the tree core known to SGLang. Once per process."""
    if BACKEND not in registered_tree_core_backends():
        register_tree_core_backend(BACKEND, HybridTreeCore)


class HybridRadixCache(UnifiedRadixCache):
    """SGLang's cache, and so for all of SGLang an instance of it; but what is evicted is decided in one call, which
    knows how much is needed."""

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


class StateComponent(MambaComponent):
    """SGLang's component, but a state is offered to the tree only if it is worth more than what would go for it.

    The pages up to it are inserted all the same: they show where later requests branch. A request that has ended gives
    a slot of its own, for which nothing is evicted: such a state is kept until memory is needed.
    """

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """The length up to which a request is inserted, and its state there in the parameters of the insert, if it is
        kept."""
        position = self._position(req, token_ids_len, is_finished)
        if position:
            core = self.tree_core
            arrival, is_admitted = self.admit(req, position, self._kind(req, position, is_finished), is_finished)
            below = core.node_by_id(req.last_node) if req.lock is not None else None
            key = core.visits.key(req.rid, req.full_untruncated_fill_ids)
            core.visits.expect_insert(Expected(insert_params, arrival, below, key))
            if not is_admitted:
                return position
        length: int | None = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        return length

    def cleanup_after_caching_req(
        self, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
    ) -> None:
        """Clean up as SGLang does, and forget a request that has ended."""
        if is_finished:
            self.tree_core.visits.end_request(req.rid, len(req.output_ids))
            self._note_hints(req)
        super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)

    def _note_hints(self, req: Any) -> None:
        """Do what a request that has ended says of what it leaves: `Req.kv_hints` and `Req.session_id`, which SGLang
        has from 0.5.23 on. There are no pins here: `retain` is left out."""
        envelope, name = getattr(req, "kv_hints", None), session_of(getattr(req, "session_id", None))
        if envelope is None and name is None:
            return
        hints, ignored = hints_of(envelope) if envelope is not None else (NO_HINTS, ())
        note_ignored(ignored)
        core = self.tree_core
        ids = array("q", [*req.origin_input_ids, *req.output_ids])
        key = key_of_ids(ids, len(ids), core.page_size, req.extra_key, req.cache_salt)
        found = core.tree.peek(key, len(key))
        end = found.deepest if found.deepest is not None and found.deepest.end == found.num_page_tokens else None
        space = str(getattr(req, "extra_key", None)), str(getattr(req, "cache_salt", None))
        session = None if name is None else (*space, name)
        core.sessions.end_request(session, end, hints)

    def _position(self, req: Any, token_ids_len: int, is_finished: bool) -> int | None:
        """The position of the state that would be offered; None: there is none, or only SGLang can tell."""
        if not self.cache.enable_mamba_extra_buffer:
            replayed = self.cache.req_to_token_pool.mamba_pool.replayssm_write_pos
            return token_ids_len if replayed is None or not is_finished else None
        if not is_finished:
            return req.kv.mamba_last_track_seqlen
        checkpoint = self._select_finished_checkpoint(req, token_ids_len)
        return checkpoint[0] if checkpoint is not None else None

    def _kind(self, req: Any, position: int, is_finished: bool) -> Kind:
        """Why the state of a request at a position is there."""
        prompt, grid = len(req.origin_input_ids), self.mamba_checkpoint_grid
        if position == req.mamba_branching_seqlen != len(req.full_untruncated_fill_ids) - grid:
            return Kind.BRANCH
        if is_finished or position > prompt:
            return Kind.TURN_END
        if position >= prompt - grid:  # of a prompt of whole pages it is a page before the end
            return Kind.PROMPT_END
        core = self.tree_core
        passes = core.places_anchors and core.visits.passes_anchor(req.rid, position * WORDS)
        return Kind.ANCHOR if passes else Kind.INTERVAL

    def admit(self, req: Any, position: int, kind: Kind, is_finished: bool) -> tuple[StateOrigin, bool]:
        """Tell what the state of a request at a position is, and whether it is worth more than one that is evicted for
        it. Where none has to be, every state is."""
        core, pool = self.tree_core, self.cache.req_to_token_pool
        end = position // core.page_size * core.page_size * WORDS
        arrival = core.visits.describe(req.rid, end, kind)
        always = is_finished or kind is Kind.ANCHOR or not core.is_choosy
        if always or pool.mamba_allocator.schedulable_available_size() > 0:
            return arrival, True
        ids = req.full_untruncated_fill_ids
        key = core.visits.key(req.rid, ids)
        if key is None or len(key) < end:
            key = key_of_ids(ids, position, core.page_size, req.extra_key, req.cache_salt)
        is_elastic = self.cache.token_to_kv_pool_allocator.mamba_full_cache_donor() is not None
        return core.visits.admit(key, end, arrival, is_elastic)
