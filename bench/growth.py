#!/usr/bin/env python
"""How the cost of the bookkeeping grows: one operation at growing sizes, and the exponent of its growth.

    python bench/growth.py [--full] [--only NAME ...] [--json]

Each figure is the fastest of some repetitions, in microseconds; the exponent is the slope of a line through the figures
in a logarithmic plot: 0 is flat, 1 is linear. `--full` adds sizes that take minutes and gigabytes. Nothing here needs a
model, tensors or a GPU.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from random import Random

from common import Line, Medians, arguments, finish, timed
from hit_rate import NoContents

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree

PAGE, PAGES_OF_A_PIECE = 16, 4
Work = Callable[[], object]


def fastest(works: Iterator[Work], times: int = 30) -> float:
    """Microseconds of the fastest of some operations; making one ready is not counted."""
    return 1e6 * min(timed(work) for work, _ in zip(works, range(times), strict=False))


def cache_of(num_pieces: int, policy: str = "lru", stored: int = 0) -> HybridCache:
    """A cache with one budget: a piece holds four pages, or one state, or `stored` checkpoints."""
    store = NoContents(0, 64 * PAGES_OF_A_PIECE // stored) if stored else None
    memory = CacheMemory.of_bytes(num_pieces * 64 * PAGES_OF_A_PIECE, 64, 64 * PAGES_OF_A_PIECE, store=store)
    return HybridCache(memory, CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy))


def opened(cache: HybridCache, key: Key, num_tokens: int = 0) -> Lease:
    lease = cache.open(key, len(key) - 1, num_tokens)
    assert lease is not None
    return lease


def request(cache: HybridCache, key: Key) -> None:
    lease, end = opened(cache, key, len(key)), (len(key) - 1) // PAGE * PAGE
    if end > lease.num_hit_tokens:
        cache.capture(lease, end)
    cache.advance(lease, len(key))
    cache.commit(lease, key, end)
    cache.close(lease)


def evict_a_page(num_tokens: int) -> Iterator[Work]:
    """One page from the tail of a leaf of n tokens."""
    tree = Tree(PAGE, PAGE, policy_of("lru"))
    tree.insert(Key.of(range(num_tokens)), num_tokens, list(range(num_tokens // PAGE)))
    return repeat(lambda: tree.evict_pages(1))


def recall(num_checkpoints: int) -> Iterator[Work]:
    """What the tree has known of a prompt that goes on below n checkpoints."""
    tree, pages = Tree(PAGE, PAGE, policy_of("lru")), list(range(num_checkpoints))
    key = Key.of(range(num_checkpoints * PAGE + 1))
    for end in range(PAGE, len(key), PAGE):
        tree.insert(key, end, pages[: end // PAGE], Checkpoint(end, end))
    found = tree.match(key, len(key))
    return repeat(lambda: tree.recall(key, found, len(key)))


def chain(depth: int, policy: str) -> tuple[HybridCache, Lease, Key]:
    """A request that has committed n pages one after the other."""
    cache, key = cache_of(depth // 4 + 60, policy), Key.of(range((depth + 101) * PAGE))
    lease = opened(cache, key, len(key))
    cache.advance(lease, len(key))
    for end in range(PAGE, depth * PAGE + 1, PAGE):
        cache.commit(lease, key, end)
    return cache, lease, key


def commit_a_page(depth: int) -> Iterator[Work]:
    """One page more of a request that has committed n pages."""
    cache, lease, key = chain(depth, "lru")
    for end in range((depth + 1) * PAGE, (depth + 100) * PAGE, PAGE):
        yield partial(cache.commit, lease, key, end)


def open_below_a_chain(depth: int) -> Iterator[Work]:
    """A request that shares five pages with one that committed n pages, and closed."""
    cache, lease, _ = chain(depth, "lhd")
    cache.close(lease)
    short = Key.of([*range(PAGE * 5), *[7] * PAGE])
    return repeat(lambda: cache.close(opened(cache, short)))


def shortage(cache: HybridCache) -> Iterator[Work]:
    """A request that gets its pages when there are none: others are evicted for it."""
    numbers = count(1)

    def fill() -> None:
        request(cache, Key.of([-next(numbers)] * (4 * PAGE + 1)))

    def serve(key: Key) -> None:
        lease = opened(cache, key)
        assert cache.reserve(lease, 8 * PAGE)
        cache.close(lease)

    while not cache.stats().evicted_pages:
        fill()
    while True:
        fill()
        yield partial(serve, Key.of([-next(numbers)] * PAGE + [1]))


def shortage_beside(pins: bool, number: int) -> Iterator[Work]:
    """The same beside n running requests, or n pins."""
    cache = cache_of(4 * number + 100)
    for key in (Key.of([at] * (PAGE + 1)) for at in range(number)):
        if pins:
            request(cache, key)
            cache.pin(key, 3600)
        else:
            opened(cache, key, len(key))
    return shortage(cache)


def move_pages(num_leases: int) -> Iterator[Work]:
    """A state slot for a request, where it takes that pages of running requests, half of them shared with the tree, are
    moved together."""
    cache, leases = cache_of((num_leases + 128) * 3 // 2), []
    for number in range(num_leases + 128):
        key = Key.of([number] * 2 * PAGE)
        leases.append(opened(cache, key, 2 * PAGE))
        cache.advance(leases[-1], 2 * PAGE)
        if number // 2 % 2:
            cache.commit(leases[-1], key, 2 * PAGE)
    for lease in leases[-128::2]:  # two pages of four are free in each of 64 pieces
        cache.close(lease)
    cache.clear()
    while cache.memory.arena is not None and cache.memory.arena.num_free:
        opened(cache, Key.of([0]))
    return repeat(lambda: opened(cache, Key.of([0])))


def move_checkpoints(num_nodes: int) -> Iterator[Work]:
    """Four pages for a request, where it takes that stored checkpoints are moved together: three are in a piece, and of
    each three one is evicted."""
    cache = cache_of(num_nodes + 64, stored=3)
    keys = [Key.of([number] * (PAGE + 1)) for number in range(num_nodes)]
    for key in keys:
        request(cache, key)
    for key in (key for number, key in enumerate(keys) if number % 3):
        cache.close(opened(cache, key))  # those that are used again are evicted last
    cache.allocator.evict(cache.tree.evict_checkpoints, num_nodes // 3)
    lease = opened(cache, Key.of([-1] * PAGE * num_nodes))
    while cache.memory.arena is not None and cache.memory.pages.num_free:
        cache.reserve(lease, (len(lease.block_table) + cache.memory.pages.num_free) * PAGE)
    return repeat(lambda: cache.reserve(lease, (len(lease.block_table) + PAGES_OF_A_PIECE) * PAGE))


def requests(policy: str, num_nodes: int) -> Iterator[Work]:
    """A request that evicts, in a tree of n nodes."""
    rng, cache = Random(0), cache_of(7 * num_nodes // 4, policy)
    for number in count():
        key = Key.of([number % 50] * PAGE + [rng.randrange(10**6) for _ in range(3 * PAGE + 1)])
        if number < num_nodes * 11 // 10:
            request(cache, key)
        else:
            yield partial(request, cache, key)


NODES = 10**3, 10**4, 10**5
OPERATIONS: dict[str, tuple[Callable[[int], Iterator[Work]], tuple[int, ...], tuple[int, ...]]] = {
    "evict a page of a leaf, by its tokens": (evict_a_page, (10**4, 10**5, 10**6), ()),
    "recall a prompt, by checkpoints above": (recall, (10, 100, 1000, 10_000), ()),
    "commit a page, by pages before it": (commit_a_page, (100, 1000, 10_000), ()),
    "open below a chain of commits, by its length": (open_below_a_chain, (5, 500, 5000), ()),
    "request in a shortage, by running requests": (partial(shortage_beside, False), (10, 100, 1000, 10_000), ()),
    "request in a shortage, by pins": (partial(shortage_beside, True), (10, 100, 4000, 10_000), ()),
    "move pages together, by running requests": (move_pages, (10, 100, 1000, 10_000), ()),
    "move stored checkpoints together, by nodes": (move_checkpoints, NODES, (10**6,)),
    "request with lru, by nodes": (partial(requests, "lru"), NODES, (10**6,)),
    "request with lhd, by nodes": (partial(requests, "lhd"), NODES[:2], NODES[2:]),
    "request with flop_aware, by nodes": (partial(requests, "flop_aware"), NODES[:2], NODES[2:]),
}
"""What is measured, at which sizes, and at which besides with `--full`."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--full", action="store_true", help="the largest sizes too")
    parser.add_argument("--only", nargs="+", default=[""], help="operations whose names contain one of these")
    args = parser.parse_args()
    lines = []
    for name, (make, usual, large) in OPERATIONS.items():
        if any(part in name for part in args.only):
            figures = {size: fastest(make(size)) for size in (*usual, *(large if args.full else ()))}
            slope = statistics.linear_regression([*map(math.log, figures)], [*map(math.log, figures.values())]).slope
            medians: Medians = {str(size): figure for size, figure in figures.items()}
            lines.append(Line(name, slope, 0.25, at_most=True, medians=medians, unit="us"))
    return finish(lines, args)


if __name__ == "__main__":
    sys.exit(main())
