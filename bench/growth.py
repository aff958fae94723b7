#!/usr/bin/env python
"""How the cost of the bookkeeping grows: one operation at growing sizes, and the exponent of its growth.

    python bench/growth.py [--only NAME ...] [--json]

Each figure is the fastest of some repetitions, in microseconds; the exponent is the slope of a line through the figures
in a logarithmic plot: 0 is flat, 1 is linear. Nothing here needs a model, tensors or a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random

from common import Line, arguments, finish, machine, timed

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree

PAGE = 16
Work = Callable[[], object]


def fastest(works: Iterator[Work], times: int = 30) -> float:
    """Microseconds of the fastest of some operations; making one ready is not counted."""
    return 1e6 * min(timed(work) for work, _ in zip(works, range(times), strict=False))


def cache_of(num_pages: int, num_states: int, policy: str = "lru") -> HybridCache:
    config = CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction=policy)
    return HybridCache(CacheMemory.of_indices(num_pages, num_states), config)


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
    while True:
        yield lambda: tree.evict_pages(1)


def chain(depth: int, policy: str) -> tuple[HybridCache, Lease, Key]:
    """A request that has committed so many pages one after the other."""
    cache, key = cache_of(depth + 200, 8, policy), Key.of(range((depth + 101) * PAGE))
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    cache.advance(lease, len(key))
    for end in range(PAGE, depth * PAGE + 1, PAGE):
        cache.commit(lease, key, end)
    return cache, lease, key


def commit_a_page(depth: int) -> Iterator[Work]:
    """One page more of a request that has committed so many."""
    cache, lease, key = chain(depth, "lru")
    for end in range((depth + 1) * PAGE, (depth + 100) * PAGE, PAGE):
        yield partial(cache.commit, lease, key, end)


def open_below_a_chain(depth: int) -> Iterator[Work]:
    """A request that shares five pages with one that committed so many, and closed."""
    cache, lease, _ = chain(depth, "lhd")
    cache.close(lease)
    short = Key.of([*range(PAGE * 5), *[7] * PAGE])
    while True:
        yield lambda: cache.close(cache.open(short, len(short) - 1, 0))  # type: ignore[arg-type]


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
            yield partial(cache.reserve, lease, 3 * PAGE)
            cache.close(lease)


def requests(policy: str, num_nodes: int) -> Iterator[Work]:
    """A request that evicts, in a tree of so many nodes."""
    rng, cache = Random(0), cache_of(4 * num_nodes + 64, num_nodes, policy)
    for number in count():
        key = Key.of([number % 50] * PAGE + [rng.randrange(10**6) for _ in range(3 * PAGE + 1)])
        if number < num_nodes * 11 // 10:
            request(cache, key)
        else:
            yield partial(request, cache, key)


OPERATIONS: dict[str, tuple[Callable[[int], Iterator[Work]], tuple[int, ...]]] = {
    "evict a page of a leaf, by its tokens": (evict_a_page, (10**4, 10**5, 10**6)),
    "commit a page, by pages before it": (commit_a_page, (100, 1000, 5000)),
    "open below a chain of commits, by its length": (open_below_a_chain, (5, 500, 5000)),
    "pages in a shortage, by running requests": (shortage, (10, 100, 1000)),
    "request with lru, by nodes": (partial(requests, "lru"), (1000, 10_000)),
    "request with lhd, by nodes": (partial(requests, "lhd"), (1000, 10_000)),
    "request with flop_aware, by nodes": (partial(requests, "flop_aware"), (1000, 10_000)),
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="operations whose names contain one of these")
    args = parser.parse_args()
    lines = []
    for name, (make, sizes) in OPERATIONS.items():
        if not any(part in name for part in args.only):
            continue
        figures = {size: fastest(make(size)) for size in sizes}
        exponent = math.log(figures[sizes[-1]] / figures[sizes[0]]) / math.log(sizes[-1] / sizes[0])
        medians: dict[str, float | None] = {str(size): figures[size] for size in sizes}
        lines.append(Line(name, exponent, 0.25, at_most=True, medians=medians, unit="us"))
    return finish(lines, machine(), args.json)


if __name__ == "__main__":
    sys.exit(main())
