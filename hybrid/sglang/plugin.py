"""The plugin that SGLang finds: it registers the backend `hybrid`, and imports nothing of the cache until it is built.

SGLang loads its plugins in every process, whatever cache is used, and only logs what they raise. So registering cannot
fail on anything but SGLang itself, and what is wrong with a configuration is said when its cache is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hybrid.sglang.installed import CHOICES, REGISTRY, refuse_missing, refuse_unknown_version, unexpected
from hybrid.sglang.options import NAMES

BACKEND = "hybrid"
"""The name for `--radix-cache-backend`, and of the tree core."""


def register() -> None:
    """Make the backend known to SGLang, and the names of policies to its flag. Once per process.

    Raises:
        VersionError: SGLang has no such registry, or has not taken the backend or a name.
    """
    try:
        registry = import_module("sglang.srt.mem_cache.registry")
        choices = import_module("sglang.srt.arg_groups.choices")
    except ModuleNotFoundError as error:
        raise unexpected(f"it has no module {error.name}, so the backend cannot be registered") from error
    refuse_missing(registry, REGISTRY, "so the backend cannot be registered")
    refuse_missing(choices, CHOICES, "so the flag would not take the names of policies")
    if BACKEND in registry.registered_radix_cache_backends():
        return
    registry.register_radix_cache_backend(BACKEND, build)
    choices.add_radix_eviction_policy_choices(
        [name for name in NAMES if name not in choices.RADIX_EVICTION_POLICY_CHOICES]
    )
    if BACKEND not in registry.registered_radix_cache_backends():
        raise unexpected("its registry has not taken the backend")
    if missing := [name for name in NAMES if name not in choices.RADIX_EVICTION_POLICY_CHOICES]:
        raise unexpected(f"its flag --radix-eviction-policy has not taken {', '.join(missing)}")


def build(context: Any) -> Any:
    """Build the cache of a scheduler, for SGLang's `create_tree_cache`.

    Args:
        context: SGLang's `TreeCacheBuildContext`.

    Raises:
        VersionError: the version of SGLang is not known, or is not as expected.
        UnsupportedModelError: the model or an option is not supported; the message names all that is not.
    """
    refuse_unknown_version()
    try:
        return import_module("hybrid.sglang.cache").build(context)
    except (ImportError, AttributeError) as error:
        raise unexpected(f"building its cache failed with {error!r}") from error
