#!/usr/bin/env python
"""How the cost of the bookkeeping grows: one operation at growing sizes, and the exponent of its growth.

    python bench/growth.py [--only NAME,...] [--largest N] [--json]

Each figure is the fastest of some repetitions, in microseconds; the exponent is the slope of a line through the figures
in a logarithmic plot: 0 is flat, 1 is linear. Nothing here needs a model, tensors or a GPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from random import Random

from common import Line, arguments, finish, machine

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Checkpoint
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree

PAGE = 16
Work = Callable[[], object]


def fastest(works: Iterator[Work], times: int = 30) -> float:
    """Microseconds of the fastest of some operations; making one ready is not counted."""
    best = math.inf
    for work, _ in zip(works, range(times), strict=False):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def cache_of(num_pages: int, num_states: int, policy: str = "lru") -> HybridCache:
    memory = CacheMemory.of_indices(num_pages, num_states)
    return HybridCache(memory, CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy))


def request(cache: HybridCache, key: Key) -> None:
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    end = (len(key) - 1) // PAGE * PAGE
    if end > lease.num_hit_tokens:
        cache.capture(lease, end)
    cache.advance(lease, len(key))
    cache.commit(lease, key, end)
    cache.close(lease)


def evict_a_page(num_tokens: int) -> Iterator[Work]:
    """One page from the tail of a leaf of so many tokens."""
    tree = Tree(PAGE, PAGE, policy_of("lru"))
    tree.insert(Key.of(range(num_tokens)), num_tokens, list(range(num_tokens // PAGE)))
    tree.evict_pages(1)
    while True:
        yield lambda: tree.evict_pages(1)


def commit_a_page(depth: int) -> Iterator[Work]:
    """One page more of a request that has committed so many, one after the other."""
    cache = cache_of(depth + 200, 4)
    key = Key.of(range((depth + 101) * PAGE))
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    cache.advance(lease, len(key))
    for end in range(PAGE, depth * PAGE + 1, PAGE):
        cache.commit(lease, key, end)
    for end in range((depth + 1) * PAGE, (depth + 100) * PAGE, PAGE):
        yield lambda end=end: cache.commit(lease, key, end)  # type: ignore[misc]


def open_below_a_chain(depth: int, policy: str = "lhd") -> Iterator[Work]:
    """A request after another that committed so many pages one after the other, and closed."""
    cache = cache_of(depth + 200, 8, policy)
    key = Key.of(range((depth + 1) * PAGE))
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    cache.advance(lease, len(key))
    for end in range(PAGE, depth * PAGE + 1, PAGE):
        cache.commit(lease, key, end)
    cache.close(lease)
    short = Key.of([*range(PAGE * min(depth, 5)), *[7] * PAGE])
    while True:

        def work() -> None:
            lease = cache.open(short, len(short) - 1, 0)
            assert lease is not None
            cache.close(lease)

        yield work


def shortage(num_leases: int) -> Iterator[Work]:
    """Pages for a request when there are none, next to so many running requests."""
    cache = cache_of(4 * num_leases + 400, num_leases + 8)
    for number in range(num_leases):
        cache.open(Key.of([number] * 4 * PAGE), 4 * PAGE - 1, 4 * PAGE)
    number = 0
    while True:
        number += 1
        while cache.memory.pages.num_free > 2:
            number += 1
            request(cache, Key.of([-number] * (4 * PAGE + 1)))
        lease = cache.open(Key.of([-number] * PAGE + [1]), PAGE, 0)
        if lease is not None:
            yield lambda lease=lease: cache.reserve(lease, 3 * PAGE)  # type: ignore[misc]
            cache.close(lease)


def request_of(policy: str) -> Callable[[int], Iterator[Work]]:
    def requests(num_nodes: int) -> Iterator[Work]:
        """A request that evicts, in a tree of so many nodes."""
        rng, cache = Random(0), cache_of(4 * num_nodes + 64, num_nodes, policy)
        for number in range(num_nodes * 11 // 10):
            request(cache, Key.of([number % 50] * PAGE + [rng.randrange(10**6) for _ in range(3 * PAGE + 1)]))
        while True:
            key = Key.of([rng.randrange(50)] * PAGE + [rng.randrange(10**6) for _ in range(3 * PAGE + 1)])
            yield lambda key=key: request(cache, key)  # type: ignore[misc]

    return requests


def lock(depth: int) -> Iterator[Work]:
    """Lock and unlock at the end of a path of so many checkpoints."""
    tree, key = Tree(1, 1, policy_of("lru")), Key.of(range(depth))
    for end in range(1, depth + 1):
        tree.insert(key, end, list(range(end)), Checkpoint(end, end))
    node = tree.peek(key, depth).checkpoint
    assert node is not None
    while True:
        yield lambda: tree.unlock(tree.lock_state(node))


OPERATIONS: dict[str, tuple[Callable[[int], Iterator[Work]], tuple[int, ...]]] = {
    "evict a page of a leaf, by its tokens": (evict_a_page, (10**4, 10**5, 10**6)),
    "commit a page, by pages before it": (commit_a_page, (100, 1000, 5000)),
    "open below a chain of commits, by its length": (open_below_a_chain, (5, 500, 5000)),
    "pages in a shortage, by running requests": (shortage, (10, 100, 1000)),
    "lock and unlock, by depth": (lock, (10, 100, 1000)),
    "request with lru, by nodes": (request_of("lru"), (1000, 10_000)),
    "request with lhd, by nodes": (request_of("lhd"), (1000, 10_000)),
    "request with flop_aware, by nodes": (request_of("flop_aware"), (1000, 10_000)),
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="operations whose names contain one of these, with commas")
    parser.add_argument("--largest", type=int, default=10**9, help="leave out larger sizes")
    args = parser.parse_args()
    lines = []
    for name, (make, sizes) in OPERATIONS.items():
        sizes = tuple(size for size in sizes if size <= args.largest)
        if len(sizes) < 2 or not any(part in name for part in args.only.split(",")):
            continue
        figures = {size: fastest(make(size)) for size in sizes}
        exponent = math.log(figures[sizes[-1]] / figures[sizes[0]]) / math.log(sizes[-1] / sizes[0])
        medians = {str(size): figures[size] for size in sizes}
        lines.append(Line(name, exponent, 0.25, at_most=True, medians=dict(medians), unit="us"))
    return finish(lines, machine(), args.json)


if __name__ == "__main__":
    sys.exit(main())
