"""The fingerprint of what a cache holds."""

from __future__ import annotations

from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.fingerprint import Fingerprint, order_of_sums
from hybrid.version import __version__


def fingerprint_of(memory: CacheMemory, config: CacheConfig, model: str, deterministic: bool) -> Fingerprint:
    """Make the fingerprint of what a cache holds.

    Args:
        model: the digest of the model, or a name for it.
        deterministic: contents are bitwise those of cold runs.

    Raises:
        ArgumentError: the memory has no contents that can be read.
    """
    return Fingerprint(
        model=model,
        page_size=config.page_size,
        chunk_size=config.chunk_size,
        page=memory.contents.page_layout(),
        checkpoint=memory.contents.checkpoint_layout(),
        deterministic=deterministic,
        sums=order_of_sums(),
        version=__version__,
    )


def fingerprint_named(memory: CacheMemory, config: CacheConfig, model: str | Fingerprint) -> Fingerprint:
    """Make the fingerprint of a caller who names the model, or knows all of it.

    Raises:
        ArgumentError: the name is no text, or the memory has no contents that can be read.
    """
    if isinstance(model, Fingerprint):
        return model
    if not isinstance(model, str) or not model:
        raise ArgumentError(f"model must be a name for the model and its weights; got {model!r:.100}")
    return fingerprint_of(memory, config, model, config.deterministic is True)
