"""The version of SGLang that is installed: that what this backend relies on is there, and fires.

Looked at when the backend is registered, when a cache is built, and on the cache that SGLang has built: a hook that
does not fire is an error.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from types import FunctionType
from typing import Any

from hybrid.errors import VersionError

TESTED = ("0.5.22", "0.5.23")
"""The versions with the interface that this backend implements: it changes with every release."""

REGISTRY = ("register_radix_cache_backend", "registered_radix_cache_backends", "create_unified_radix_cache")
CHOICES = ("add_radix_eviction_policy_choices", "RADIX_EVICTION_POLICY_CHOICES")
"""Names in SGLang's modules `registry` and `choices` that registering and building use."""

PARAMETERS = ("eviction_policy", "eviction_policy_config", "tree_core_backend", "component_registry_override")
"""Fields of SGLang's `CacheInitParams` that are read or set: one that it has not would have no effect."""


def unexpected(what: str) -> VersionError:
    """The error for something in SGLang that is not as expected.

    Args:
        what: a sentence without its full stop.
    """
    return VersionError(
        f"SGLang {version('sglang')} is installed: {what}. --radix-cache-backend hybrid is known to work with "
        f"{' and '.join(TESTED)}: install one of them, update hybrid-prefix-cache, or leave the flag out"
    )


def refuse_unknown_version() -> None:
    """Refuse a version of SGLang whose interface is not known.

    Raises:
        VersionError: it is none of `TESTED`.
    """
    if version("sglang") not in TESTED:
        raise unexpected("its cache interface is not known here")


def refuse_missing(owner: Any, names: Collection[str], purpose: str) -> None:
    """Look for attributes of something of SGLang.

    Args:
        owner: a module or an object.
        purpose: what could not be done without them, beginning with "so".

    Raises:
        VersionError: it has not all of them.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise unexpected(f"{kind} has no {' and no '.join(missing)}, {purpose}")


def refuse_uncalled(ours: type, theirs: type, own: Collection[str] = ()) -> None:
    """Compare the methods of a class with those of SGLang's that it is derived from.

    Args:
        own: methods that this backend calls itself.

    Raises:
        VersionError: SGLang would not call a method: it has none of that name.
    """
    methods = [name for name, value in vars(ours).items() if isinstance(value, FunctionType | property)]
    hooks = [name for name in methods if not name.startswith("_") and name not in own]
    refuse_missing(theirs, hooks, f"so those of {ours.__name__} would never be called")


def refuse_other_parts(parts: dict[str, tuple[Any, type]]) -> None:
    """Look at the parts of the cache that SGLang has built: its first use.

    Args:
        parts: of each name what was built, and the class that was asked for.

    Raises:
        VersionError: SGLang has taken a part of its own.
    """
    for name, (built, asked) in parts.items():
        if type(built) is not asked:
            raise unexpected(f"it has built its cache with {type(built).__name__} as {name}, and not {asked.__name__}")
