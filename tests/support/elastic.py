"""The shared parts of tests of one budget for pages and checkpoints.

A page holds two tokens. `ONE` is a piece of four pages or one state, `TWO` a piece of three pages or two states,
`THREE` one of two pages or three states. State slot 0 is the empty state, so that piece 0 always holds states.
"""

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.memory.arena import PieceLayout
from hybrid.memory.memory import CacheMemory
from support.caches import AuditedCache, Contents, key_of

ONE, TWO, THREE = (64, 256), (128, 192), (192, 128)
"""Bytes of a page and of a state."""


def elastic(
    num_pieces: int, sizes: tuple[int, int], chunk_size: int = 2, stored_bytes: int | None = None
) -> AuditedCache:
    """A cache of `num_pieces` pieces, that of the empty state included, without tensors, that audits itself.

    Args:
        stored_bytes: of a stored checkpoint; None: checkpoints are state slots.
    """
    layout = PieceLayout.of(*sizes, stored_bytes or 0)
    config = CacheConfig(page_size=2, chunk_size=chunk_size, eviction="lru")
    contents = Contents(stored_bytes or 0)
    store = contents if stored_bytes is not None else None
    memory = CacheMemory.of_bytes((num_pieces - 1) * layout.num_bytes, *sizes, mover=contents, store=store)
    return AuditedCache(memory, config)


def held(cache: HybridCache) -> tuple[int, int, int, int, int]:
    """Return the counts that a call which changed nothing leaves alone."""
    stats = cache.stats()
    return (
        stats.evicted_pages,
        stats.evicted_checkpoints,
        stats.pages_cached,
        stats.checkpoints,
        stats.pages_private + stats.states_private,
    )


def run(cache: HybridCache, text: str) -> Lease:
    """An open request that has pages for its text, and has computed all of it."""
    lease = cache.open(key_of(cache, text), 2 * len(text) - 1, 2 * len(text))
    assert lease is not None
    cache.advance(lease, 2 * len(text))
    return lease


def finish(cache: HybridCache, lease: Lease, text: str) -> None:
    """Its front becomes the checkpoint at its end."""
    cache.donate_states(lease, 2 * len(text))
    cache.commit(lease, key_of(cache, text), 2 * len(text))
    cache.close(lease)
