#!/usr/bin/env python
"""The same operations, and the same trace of 5001 requests, on any hybrid prefix tree.

    python bench/trees/operations.py MODULE:CALLABLE PART      # prints figures as JSON

for example `hybrid_tree:HybridTree`, `sglang_tree:rust` or `sglang_tree:python`, and `match`. It is called with
`page_size`, `kv_slots` (tokens) and `state_slots`, and what it returns has

    page                         tokens per page
    unit                         tokens per entry of the KV index arrays: 1 (an index per token), or page
    joined((first, second))      two of those arrays as one
    kv, st                       allocators: alloc(tokens or states) -> indices or None, free(indices), available_size()
    key(tokens: array("q"))      the tree's own form of a request's tokens, made once per request
    match(key, n)                -> (hit, node, branching length or None) of the first n tokens; node None: no hit
    indices(node)                -> KV indices from the root to a node
    insert(key, n, kv, state, previous) -> (existing, node, adopted): takes in the first n tokens, frees the
                                 duplicates kv[previous:existing]; the state is the caller's where it is not adopted
    lock(node) -> receipt; unlock(node, receipt)
    evict(tokens, states), evict_for_alloc(tokens, states) -> (tokens freed, states freed), at least these
    check()                      everything is free or in the tree, and nothing is locked

One thread, medians, microseconds if nothing else is said; pages of 64 tokens where the tree knows pages. Compare only
figures of one sitting on one machine: `bench/tree.py` takes them in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import platform
import random
import statistics
import sys
from array import array
from collections.abc import Callable, Iterator
from time import perf_counter as now
from typing import Any

import numpy as np

Tree = Any
Make = Callable[..., Tree]
Figures = Iterator[tuple[str, float]]

RNG = np.random.default_rng(0)
VOCAB = 150_000


def tokens(count: int) -> array[int]:
    return array("q", RNG.integers(1, VOCAB, count, dtype=np.int64).tobytes())


def seconds_of(call: Callable[..., object], *args: Any) -> float:
    start = now()
    call(*args)
    return now() - start


def median_of(times: list[float]) -> float:
    return round(1e6 * statistics.median(times), 2)


def put(tree: Tree, key: Any, count: int) -> None:
    """Insert the first tokens of a key with new KV and a new state."""
    kv, state = tree.kv.alloc(count), tree.st.alloc(1)
    assert kv is not None
    assert state is not None
    tree.insert(key, count, kv, state, 0)


def put_path(tree: Tree, length: int, step: int) -> Any:
    """Insert a path of nodes of `step` tokens each; returns its key."""
    key = tree.key(tokens(length))
    for end in range(step, length + 1, step):
        put(tree, key, end)
    return key


def match(make: Make) -> Figures:
    """The whole of a path, of one node or of many."""
    for label, length, count in (("8k", 8192, 200), ("128k", 131072, 60)):
        for nodes in ("1 node", "32 nodes"):
            tree = make(page_size=64, kv_slots=300_000, state_slots=512)
            key = put_path(tree, length, length // int(nodes.split()[0]))
            assert tree.match(key, length)[0] == length
            yield f"match {label}, {nodes}", median_of([seconds_of(tree.match, key, length) for _ in range(count)])


def insert(make: Make) -> Figures:
    """A path that leaves another one inside an edge; and one that is there already."""
    tree = make(page_size=64, kv_slots=8192 * 130, state_slots=200)
    bases = [tokens(8192) for _ in range(60)]
    for base in bases:
        put(tree, tree.key(base), 8192)
    keys = [tree.key(base[:4096] + tokens(4096)) for base in bases]
    given = [(tree.kv.alloc(8192), tree.st.alloc(1)) for _ in keys]
    times = [seconds_of(tree.insert, key, 8192, *pair, 0) for key, pair in zip(keys, given, strict=True)]
    assert all(tree.match(key, 8192)[0] == 8192 for key in keys)
    yield "insert 8k, split at 4k", median_of(times)
    tree = make(page_size=64, kv_slots=300_000, state_slots=1024)
    key, times = put_path(tree, 131072, 256), []
    for _ in range(20):
        kv, state = tree.kv.alloc(131072), tree.st.alloc(1)
        times.append(seconds_of(tree.insert, key, 131072, kv, state, 0))
        tree.st.free(state)  # the tree has one there
    yield "insert 128k already cached, 512 nodes", median_of(times)


def lock(make: Make) -> Figures:
    for depth in (1, 100):
        tree = make(page_size=1, kv_slots=1_000_000, state_slots=512)
        node = tree.match(put_path(tree, 64 * depth, 64), 64 * depth)[1]
        locks, unlocks = [], []
        for _ in range(300):
            start = now()
            receipt = tree.lock(node)
            locked = now()
            tree.unlock(node, receipt)
            unlocks.append(now() - locked)
            locks.append(locked - start)
        yield f"lock + unlock, depth {depth}", median_of(locks) + median_of(unlocks)


def evict(make: Make, length: int = 128) -> Figures:
    """Leaves of one common prompt, one by one and in bulk; states of inner nodes in bulk."""
    system = tokens(1024)

    def leaves(count: int) -> Tree:
        tree = make(page_size=1, kv_slots=count * length + 40_000, state_slots=count + 50)
        for _ in range(count):
            put(tree, tree.key(system + tokens(length)), 1024 + length)
        return tree

    def rate(of: int, tree: Tree, num_tokens: int, num_states: int) -> float:
        start = now()
        freed = tree.evict(num_tokens, num_states)[of]
        return float(freed / (now() - start))

    tree = leaves(100_000)
    times = [seconds_of(tree.evict, 1, 0) for _ in range(50)]
    yield "evict one leaf per call, 100,000 leaves", median_of(times)
    yield "evict leaves in bulk: leaves/s", rate(0, leaves(10_000), 10_000 * length // 2, 0) / length
    tree = make(page_size=1, kv_slots=600_000, state_slots=6000)
    for _ in range(100):
        put_path(tree, 50 * 64, 64)
    yield "evict inner checkpoints in bulk: states/s", rate(1, tree, 0, 4000)


def make_trace(requests: int = 5001, prompts: int = 200, live_max: int = 64) -> list[array[int]]:
    """Conversations of three turns of 200 tokens on Zipf-popular prompts of 1024, `live_max` of them at a time."""
    turn, turns = 200, 3
    pick, rng = random.Random(7), np.random.default_rng(7)
    systems = [rng.integers(1, VOCAB, 1024, dtype=np.int64) for _ in range(prompts)]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    waiting: list[list[array[int]]] = []
    for _ in range(requests // turns):
        ids, rounds = systems[pick.choices(range(prompts), weights)[0]], []
        for _ in range(turns):
            ids = np.concatenate([ids, rng.integers(1, VOCAB, turn, dtype=np.int64)])
            rounds.append(array("q", ids.tobytes()))
        waiting.append(rounds)
    live: list[list[array[int]]] = []
    trace = []
    while waiting or live:
        while waiting and len(live) < live_max:
            live.append(waiting.pop(0))
        chosen = pick.choice(range(len(live)))
        trace.append(live[chosen].pop(0))
        if not live[chosen]:
            live.pop(chosen)
    return trace


class Mixed:
    """A trace on a tree: match, lock, indices, evict where memory is short, insert at the branching point and at the
    last point of the grid.

    Attributes:
        hit_tokens, num_tokens, evicted_tokens: of all requests.
    """

    GRID = 64

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.hit_tokens = self.num_tokens = self.evicted_tokens = 0

    def entries(self, count: int) -> int:
        """Entries of the KV index arrays that hold `count` tokens."""
        return -(-count // self.tree.unit)

    def request(self, ids: array[int]) -> None:
        tree, length = self.tree, len(ids)
        key = tree.key(ids)
        hit, node, branching = tree.match(key, length - 1)
        self.hit_tokens, self.num_tokens = self.hit_tokens + hit, self.num_tokens + length
        receipt = tree.lock(node)
        row = tree.indices(node) if hit else None
        need = length - hit
        if tree.kv.available_size() < need:
            self.evicted_tokens += tree.evict_for_alloc(need - tree.kv.available_size(), 0)[0]
        new = tree.kv.alloc(need)
        assert new is not None
        row, end, previous = new if row is None else tree.joined((row, new)), length // self.GRID * self.GRID, hit
        for point in ([branching] if branching is not None and branching < end else []) + [end]:
            state = self.state()
            existing, deeper, adopted = tree.insert(key, point, row[: self.entries(point)], state, previous)
            if not adopted:
                tree.st.free(state)
            if existing > previous:  # the tree keeps the KV that it had
                row = tree.joined((tree.indices(deeper), row[self.entries(point) :]))
            tree.unlock(node, receipt)
            receipt, node, previous = tree.lock(deeper), deeper, point
        if length > previous:
            tree.kv.free(row[self.entries(-(-previous // tree.page) * tree.page) :])
        tree.unlock(node, receipt)

    def state(self) -> Any:
        state = self.tree.st.alloc(1)
        if state is None:
            self.tree.evict_for_alloc(0, 1)
            state = self.tree.st.alloc(1)
            assert state is not None
        return state


def mixed(make: Make) -> Figures:
    trace, sizes = make_trace(), {"page_size": 64, "kv_slots": 262_144, "state_slots": 512}
    first = Mixed(make(**sizes))
    for number, ids in enumerate(trace[:600]):  # warms up, and is checked
        first.request(ids)
        if number % 500 == 0:
            first.tree.check()
    gc.collect()
    run = Mixed(make(**sizes))
    seconds = seconds_of(lambda: [run.request(ids) for ids in trace])
    run.tree.check()
    yield "mixed trace, 512 states: requests/s", len(trace) / seconds


def memory(make: Make, count: int = 1000, length: int = 4096) -> Figures:
    """Bytes per token by which this process grows as a tree takes in leaves after a prompt that they share. True only
    in a process that has done nothing else: what another tree has freed hides the growth."""
    import psutil

    prompt = 1024
    make(page_size=64, kv_slots=4096, state_slots=8)  # what is loaded or made once does not belong to a tree
    shared = tokens(prompt)
    requests = [shared + tokens(length) for _ in range(count)]
    tree = make(page_size=64, kv_slots=(count + 1) * length + 3 * prompt, state_slots=count + 10)

    def resident() -> int:
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        return int(psutil.Process().memory_info().rss)

    before = resident()
    for ids in requests:
        put(tree, tree.key(ids), prompt + length)
    yield "memory, 1000 leaves of 4096: B/token", (resident() - before) / (count * length)


PARTS = {part.__name__: part for part in (match, insert, lock, evict, mixed, memory)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", metavar="MODULE:CALLABLE")
    parser.add_argument("part", choices=list(PARTS))
    args = parser.parse_args()
    module, _, name = args.tree.partition(":")
    print(json.dumps(dict(PARTS[args.part](getattr(importlib.import_module(module), name)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
