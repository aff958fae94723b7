"""Building SGLang's unified cache around this project's tree."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.runtime_context import get_exec

from hybrid.sglang.cache import HybridRadixCache
from hybrid.sglang.plugin import BACKEND
from hybrid.sglang.policies import DEFAULT, Options, policy_named
from hybrid.sglang.refusals import refusals, refuse
from hybrid.sglang.states import StateComponent
from hybrid.sglang.tree_core import HybridTreeCore


def build(context: Any) -> Any:
    """The cache of a scheduler.

    Args:
        context: SGLang's `TreeCacheBuildContext`. Its parameters are set to this project's tree core and component.

    Raises:
        UnsupportedModelError: the model or an option is not supported.
        ArgumentError: the policy or its configuration is unknown.
    """
    params = context.params
    if context.disable_radix_cache:
        return create_unified_radix_cache(context)
    refuse(refusals(context, params, get_exec().mamba.mamba_max_states_per_path))
    if not context.server_args._radix_eviction_policy_explicitly_set:
        params.eviction_policy = DEFAULT
    policy_named(params.eviction_policy)
    Options.of(params.eviction_policy_config)
    register_tree_core()
    params.tree_core_backend = BACKEND
    params.component_registry_override = {
        **(params.component_registry_override or {}),
        ComponentType.MAMBA: StateComponent,
    }
    return create_unified_radix_cache(context, cache_class=HybridRadixCache)


def register_tree_core() -> None:
    """Make the tree core known to SGLang. Once per process."""
    if BACKEND not in registered_tree_core_backends():
        register_tree_core_backend(BACKEND, HybridTreeCore)
