"""The plugin that SGLang finds: it registers the backend `hybrid`, and imports nothing of the cache until it is built.

SGLang loads its plugins in every process, whatever cache is used, and only logs what they raise. So registering cannot
fail on anything but SGLang itself, and what is wrong with a configuration is said when its cache is built.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from hybrid.errors import UnsupportedModelError
from hybrid.sglang.policies import NAMES

BACKEND = "hybrid"
"""The name for `--radix-cache-backend`, and of the tree core."""

VERSIONS = ("0.5.22", "0.5.23")
"""The versions of SGLang with the interface that this backend implements: it changes with every release."""


def register() -> None:
    """Make the backend known to SGLang, and the names of policies to its flag. Once per process."""
    registry = import_module("sglang.srt.mem_cache.registry")
    if BACKEND in registry.registered_radix_cache_backends():
        return
    choices = import_module("sglang.srt.arg_groups.choices")
    registry.register_radix_cache_backend(BACKEND, build)
    choices.add_radix_eviction_policy_choices(
        [name for name in NAMES if name not in choices.RADIX_EVICTION_POLICY_CHOICES]
    )


def build(context: Any) -> Any:
    """Build the cache of a scheduler, for SGLang's `create_tree_cache`.

    Args:
        context: SGLang's `TreeCacheBuildContext`.

    Raises:
        UnsupportedModelError: the version of SGLang, the model or an option is not supported; the message names all
            that is not.
    """
    check_version(version("sglang"))
    return import_module("hybrid.sglang.build").build(context)


def check_version(found: str) -> None:
    """Refuse a version of SGLang whose interface is not known.

    Raises:
        UnsupportedModelError: it is none of `VERSIONS`.
    """
    if found not in VERSIONS:
        raise UnsupportedModelError(
            f"--radix-cache-backend {BACKEND} knows the cache interface of SGLang {' and '.join(VERSIONS)}, and SGLang "
            f"{found} is installed: install that, update hybrid-prefix-cache, or leave the flag out"
        )
