"""What the tests of one budget for pages and checkpoints share.

A page holds two tokens. `ONE` is a piece of four pages or one state, `TWO` a piece of three pages or two states,
`THREE` one of two pages or three states. State slot 0 is the empty state, so that piece 0 always holds states.
"""

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.memory.arena import PieceLayout
from support.caches import AuditedCache, Content, Memory, RandomWorkload, key_of

ONE, TWO, THREE = (64, 256), (128, 192), (192, 128)
"""Bytes of a page and of a state."""


def elastic(
    num_pieces: int, sizes: tuple[int, int], chunk_size: int = 2, record_bytes: int | None = None
) -> AuditedCache:
    """A cache of so many pieces, that of the empty state included, on indices, that audits itself."""
    layout = PieceLayout.of(*sizes, record_bytes or 0)
    config = CacheConfig(page_size=2, chunk_size=chunk_size, eviction="lru")
    cache = AuditedCache.of_bytes((num_pieces - 1) * layout.num_bytes, *sizes, config, record_bytes)
    assert isinstance(cache, AuditedCache)
    return cache


def held(cache: HybridCache) -> tuple[int, int, int, int, int]:
    """What a call that changed nothing leaves alone."""
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


class Mover:
    """Moves what a `Memory` says that pages and states hold."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.records: dict[int, Content] = {}

    @staticmethod
    def move(contents: dict[int, Content], moves: dict[int, int]) -> None:
        assert not moves.keys() & set(moves.values())
        moved = {new: contents[old] for old, new in moves.items() if old in contents}
        for place in (*moves, *moves.values()):
            contents.pop(place, None)
        contents.update(moved)

    def move_pages(self, moves: dict[int, int]) -> None:
        self.move(self.memory.pages, moves)

    def move_states(self, moves: dict[int, int]) -> None:
        self.move(self.memory.states, moves)

    def move_records(self, moves: dict[int, int]) -> None:
        self.move(self.records, moves)

    # Where checkpoints are stored smaller

    def store(self, slot: int, record: int) -> None:
        self.records[record] = self.memory.states[slot]

    def restore(self, record: int, slot: int) -> None:
        self.memory.states[slot] = self.records[record]


class Records(Memory):
    """A memory whose checkpoints are stored apart from the states."""

    records: dict[int, Content]

    def check(self) -> None:
        states, self.states = self.states, self.records
        super().check()
        self.states = states


def random_requests(cache: AuditedCache, seed: int) -> RandomWorkload:
    workload = RandomWorkload(cache, seed)
    apart = cache.checkpoints is not cache.states
    if apart:
        workload.memory = Records(cache)
    mover = cache._room.mover = Mover(workload.memory)
    if apart:
        workload.memory.records = mover.records
        cache._tensors = mover
    return workload
