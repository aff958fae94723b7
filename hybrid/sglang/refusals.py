"""What of SGLang this backend does not do, and why: refused when the cache is built, and not found out in service."""

from __future__ import annotations

from typing import Any

from hybrid.errors import UnsupportedModelError


def refusals(context: Any, params: Any, max_states_per_path: int) -> list[str]:
    """What is asked for and not supported, each with its reason.

    Args:
        context: SGLang's `TreeCacheBuildContext`; None: only the parameters are known.
        params: SGLang's `CacheInitParams`.
        max_states_per_path: SGLang's option of that name; negative: no limit.
    """
    found = []
    if context is not None:
        if context.enable_hierarchical_cache:
            found.append("--enable-hierarchical-cache (HiCache): nodes of this tree have no copies in host memory")
        if context.is_hybrid_swa:
            found.append("a model with sliding windows: this tree keeps all pages of a prefix or none")
        if not context.is_hybrid_ssm:
            found.append("a model without linear-attention states: SGLang's own cache serves it, leave the flag out")
    if params.enable_session_radix_cache:
        found.append("--enable-session-radix-cache: references of sessions to nodes are not kept")
    if params.enable_kv_cache_events:
        found.append("KV cache events (--kv-events-config): this tree does not record them")
    if max_states_per_path >= 0:
        found.append("--mamba-max-states-per-path: the eviction policy decides which states stay")
    return found


def refuse(found: list[str]) -> None:
    """
    Raises:
        UnsupportedModelError: there is something to refuse; it is all named.
    """
    if found:
        raise UnsupportedModelError("--radix-cache-backend hybrid does not support " + "; nor ".join(found))
