"""Options of this backend: policies of eviction by the names of SGLang's flag `--radix-eviction-policy`, its
own, and what of SGLang is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.errors import ArgumentError, UnsupportedModelError
from hybrid.mirror.options import MirrorOptions
from hybrid.tree.policies import POLICIES, policy_of
from hybrid.tree.policy import Policy

DEFAULT = "lhd"
"""The policy where `--radix-eviction-policy` is not given."""

NAMES = tuple(POLICIES)
"""The policies that there are. Names that SGLang has too mean what they mean there, for states as well."""

CLASSIC = frozenset({"lru", "lfu", "fifo", "mru", "filo", "priority"})
"""Policies as SGLang has them: every state is kept, and there are no anchors."""


class Options(MirrorOptions):
    """Options that `--radix-eviction-policy-config` may have, as JSON. With `ghost_branches`, as SGLang saves one state
    per prefill, such a state takes the place of the prompt's last."""

    __slots__ = ()

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Options:
        """The options of a configuration.

        Raises:
            ArgumentError: there is no such option, or its value is of another type.
        """
        return cls.read("--radix-eviction-policy-config", config)


def policy_named(name: str) -> Policy:
    """The policy of a name, in capitals or not.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name.lower() not in POLICIES:
        raise ArgumentError(
            f"backend hybrid has no eviction policy {name!r:.100}; it has: {', '.join(NAMES)}. SGLang's slru and tlru "
            "are for trees without states: leave --radix-eviction-policy out for lhd"
        )
    return policy_of(name.lower())


def refuse_unsupported(context: Any, params: Any, max_states_per_path: int) -> None:
    """Refuse what this backend does not do when the cache is built, so that it is not found out in service.

    Args:
        context: SGLang's `TreeCacheBuildContext`; None: only the parameters are known.
        params: SGLang's `CacheInitParams`.
        max_states_per_path: SGLang's option of that name; negative: no limit.

    Raises:
        UnsupportedModelError: something is asked for that is not supported; all of it is named, each with its reason.
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
    if found:
        raise UnsupportedModelError("--radix-cache-backend hybrid does not support " + "; nor ".join(found))
