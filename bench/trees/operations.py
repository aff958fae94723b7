#!/usr/bin/env python
"""The same operations, and the same trace of 5001 requests, on any hybrid prefix tree.

    python bench/trees/operations.py MODULE:CALLABLE [--only match mixed] [--json FILE]

for example `hybrid_tree:HybridTree`, `sglang_tree:rust`, `sglang_tree:python`, or `allocators:EmptyTree`, which shows
what this program itself costs. It is called with `page_size`, `kv_slots` (tokens) and `state_slots`, and what it
returns has

    name, page                   a label; tokens per page
    unit                         tokens per entry of the KV index arrays: 1 (an index per token), or page
    kv, st                       allocators: alloc(tokens or states) -> indices or None, free(indices),
                                 available_size(), size
    key(tokens: array("q"))      the tree's own form of a request's tokens, made once per request
    match(key, n)                -> (hit, node, branching length or None, KV hit) of the first n tokens
    indices(node)                -> KV indices from the root to a node
    insert(key, n, kv, state, previous) -> (existing, node, adopted): takes in the first n tokens, frees the
                                 duplicates kv[previous:existing]; the state is the caller's where it is not adopted
    lock(node) -> receipt; unlock(node, receipt)
    evict(tokens, states), evict_for_alloc(tokens, states) -> (tokens freed, states freed)
    check(); sizes() -> {kv_evictable, kv_protected, st_evictable, st_protected} in tokens and states

One thread, medians. Compare only figures of one sitting on one machine: `bench/tree.py` takes them in turns.
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
import time
from array import array
from collections.abc import Callable
from time import perf_counter as now
from typing import Any

import numpy as np

Tree = Any
Make = Callable[..., Tree]
Figures = dict[str, Any]

RNG = np.random.default_rng(0)
VOCAB = 150_000


def tokens(count: int) -> array[int]:
    return array("q", RNG.integers(1, VOCAB, count, dtype=np.int64).tobytes())


def micros(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def median_of(times: list[float]) -> float:
    return micros(statistics.median(times))


def seconds_of(call: Callable[[], object]) -> float:
    start = now()
    call()
    return now() - start


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


def match(make: Make, figures: Figures) -> None:
    """The whole of a path, of one node or of many, and its KV indices."""
    for page in (1, 16, 64):
        for nodes in (1, 32):
            for length in (1024, 8192, 32768, 131072):
                if length // nodes % page:
                    continue
                tree = make(page_size=page, kv_slots=300_000, state_slots=512)
                key = put_path(tree, length, length // nodes)
                hit, node, *_ = tree.match(key, length)
                assert hit == length, (hit, length)
                where = f"page{page} len{length} nodes{nodes}"
                count = 200 if length <= 8192 else 60
                times = [seconds_of(lambda t=tree, k=key, n=length: t.match(k, n)) for _ in range(count)]
                figures[f"match {where}"] = median_of(times)
                times = [seconds_of(lambda t=tree, n=node: t.indices(n)) for _ in range(100)]
                figures[f"indices {where}"] = median_of(times)


def insert(make: Make, figures: Figures) -> None:
    """A path that leaves another one inside an edge, or where it has been split; and one that is there already."""
    for page in (1, 16, 64):
        tree = make(page_size=page, kv_slots=8192 * 400, state_slots=2000)
        bases = [tokens(8192) for _ in range(60)]
        for base in bases:
            put(tree, tree.key(base), 8192)
        for label in ("split at 4k", "share 4k"):  # in the second round the nodes are split already
            times = []
            for base in bases:
                key = tree.key(base[:4096] + tokens(4096))
                kv, state = tree.kv.alloc(8192), tree.st.alloc(1)
                start = now()
                existing, *_ = tree.insert(key, 8192, kv, state, 0)
                times.append(now() - start)
                assert existing == 4096
            figures[f"insert 8k, {label} page{page}"] = median_of(times)
    tree = make(page_size=64, kv_slots=300_000, state_slots=1024)
    key = put_path(tree, 131072, 256)
    times = []
    for _ in range(20):
        kv, state = tree.kv.alloc(131072), tree.st.alloc(1)
        start = now()
        _, _, adopted = tree.insert(key, 131072, kv, state, 0)
        times.append(now() - start)
        if not adopted:
            tree.st.free(state)
    figures["insert 128k already cached, 512 nodes page64"] = median_of(times)


def lock(make: Make, figures: Figures) -> None:
    for depth in (1, 10, 100):
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
        figures[f"lock depth{depth}"], figures[f"unlock depth{depth}"] = median_of(locks), median_of(unlocks)


def evict(make: Make, figures: Figures, length: int = 128) -> None:
    """Leaves of one common prompt, in bulk and one by one; states of inner nodes in bulk."""
    system = tokens(1024)

    def leaves(count: int) -> Tree:
        tree = make(page_size=1, kv_slots=count * length + 40_000, state_slots=count + 50)
        for _ in range(count):
            put(tree, tree.key(system + tokens(length)), 1024 + length)
        return tree

    tree = leaves(10_000)
    start = now()
    freed, _ = tree.evict(10_000 * length // 2, 0)
    figures["evict KV in bulk, 10k leaves: leaves/s"] = round(freed / length / (now() - start))
    for count in (1_000, 10_000, 100_000):
        tree = leaves(count)
        times = [seconds_of(lambda t=tree: t.evict(1, 0)) for _ in range(50)]
        figures[f"evict one leaf per call, {count} leaves"] = median_of(times)
    times = [seconds_of(lambda: tree.evict(0, 1)) for _ in range(50)]
    figures["evict one state per call, 100000 leaves"] = median_of(times)
    tree = make(page_size=1, kv_slots=600_000, state_slots=6000)
    for _ in range(100):
        put_path(tree, 50 * 64, 64)
    start = now()
    _, freed = tree.evict(0, 4000)
    figures["evict inner states in bulk: states/s"] = round(freed / (now() - start))


def make_trace(requests: int = 5001, prompts: int = 200, live_max: int = 64) -> list[array[int]]:
    """Conversations of three turns of 200 tokens on Zipf-popular prompts of 1024, `live_max` of them at a time."""
    turn, turns = 200, 3
    pick, rng = random.Random(7), np.random.default_rng(7)
    systems = [rng.integers(1, VOCAB, 1024, dtype=np.int64) for _ in range(prompts)]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    conversations = []
    for _ in range(requests // turns):
        ids, rounds = systems[pick.choices(range(prompts), weights)[0]], []
        for _ in range(turns):
            ids = np.concatenate([ids, rng.integers(1, VOCAB, turn, dtype=np.int64)])
            rounds.append(array("q", ids.tobytes()))
        conversations.append(rounds)
    waiting, live, done, trace = list(range(len(conversations))), [], {}, []
    while waiting or live:
        while waiting and len(live) < live_max:
            live.append(waiting.pop(0))
            done[live[-1]] = 0
        chosen = pick.choice(live)
        trace.append(conversations[chosen][done[chosen]])
        done[chosen] += 1
        if done[chosen] == turns:
            live.remove(chosen)
    return trace


class Mixed:
    """A trace on a tree: match, lock, indices, evict where memory is short, insert at the branching point and at the
    last point of the grid.

    Attributes:
        times: seconds of each call, by its name.
        hit_tokens, num_tokens: of all requests.
    """

    GRID = 64

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.times: dict[str, list[float]] = {}
        self.hit_tokens = self.num_tokens = 0

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = now()
        result = call(*args)
        self.times.setdefault(name, []).append(now() - start)
        return result

    def entries(self, count: int) -> int:
        """Entries of the KV index arrays that hold `count` tokens."""
        return -(-count // self.tree.unit)

    def request(self, ids: array[int]) -> None:
        tree, length = self.tree, len(ids)
        key = self.timed("key", tree.key, ids)
        hit, node, branching, _ = self.timed("match", tree.match, key, length - 1)
        self.hit_tokens, self.num_tokens = self.hit_tokens + hit, self.num_tokens + length
        receipt = self.timed("lock", tree.lock, node)
        row = self.timed("indices", tree.indices, node) if hit else None
        need = length - hit
        if tree.kv.available_size() < need:
            self.timed("evict_kv", tree.evict_for_alloc, need - tree.kv.available_size(), 0)
        new = tree.kv.alloc(need)
        assert new is not None
        row, end, previous = new if row is None else joined(row, new), length // self.GRID * self.GRID, hit
        for point in ([branching] if branching is not None and branching < end else []) + [end]:
            state = self.state()
            given = row[: self.entries(point)]
            existing, deeper, adopted = self.timed("insert", tree.insert, key, point, given, state, previous)
            if not adopted:
                tree.st.free(state)
            if existing > previous:  # the tree keeps the KV that it had
                row = joined(tree.indices(deeper), row[self.entries(point) :])
            self.timed("unlock", tree.unlock, node, receipt)
            receipt, node, previous = self.timed("lock", tree.lock, deeper), deeper, point
        if length > previous:
            tree.kv.free(row[self.entries(-(-previous // tree.page) * tree.page) :])
        self.timed("unlock", tree.unlock, node, receipt)

    def state(self) -> Any:
        state = self.tree.st.alloc(1)
        if state is None:
            self.timed("evict_state", self.tree.evict_for_alloc, 0, 1)
            state = self.tree.st.alloc(1)
            assert state is not None
        return state

    def check(self) -> None:
        """Everything is free or in the tree."""
        tree, sizes = self.tree, self.tree.sizes()
        tree.check()
        for kind, allocator in (("kv", tree.kv), ("st", tree.st)):
            held = sizes[f"{kind}_evictable"] + sizes[f"{kind}_protected"]
            assert held + allocator.available_size() == allocator.size, (kind, sizes, allocator.available_size())


def joined(first: Any, second: Any) -> Any:
    """Two arrays of indices as one."""
    if isinstance(first, np.ndarray):
        return np.concatenate((first, second))
    import torch

    return torch.cat((first, second))


def mixed(make: Make, figures: Figures) -> None:
    trace = make_trace()
    for page in (1, 64):
        for states in (512, 4096):
            sizes = {"page_size": page, "kv_slots": 262_144, "state_slots": states}
            first = Mixed(make(**sizes))
            for number, ids in enumerate(trace[:600]):  # warms up, and is checked
                first.request(ids)
                if number % 500 == 0:
                    first.check()
            gc.collect()
            run = Mixed(make(**sizes))
            start, cpu = now(), time.process_time()
            for ids in trace:
                run.timed("request", run.request, ids)
            wall, cpu = now() - start, time.process_time() - cpu
            run.check()
            where = f"page{page} states{states}"
            figures[f"mixed {where}: requests/s"] = round(len(trace) / wall)
            figures[f"mixed {where}: requests/cpu-s"] = round(len(trace) / cpu)
            figures[f"mixed {where}: hit rate"] = round(run.hit_tokens / run.num_tokens, 4)
            for name, times in run.times.items():
                times.sort()
                middle, late = times[len(times) // 2], times[int(len(times) * 0.99)]
                figures[f"mixed {where} {name} p50/p99"] = [micros(middle), micros(late)]


def memory(make: Make, figures: Figures, count: int = 1000, length: int = 4096) -> None:
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
    grown = resident() - before
    figures[f"memory, {count} leaves of {length} tokens page64: B/token"] = round(grown / (count * length), 2)


PARTS = {part.__name__: part for part in (match, insert, lock, evict, mixed, memory)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", metavar="MODULE:CALLABLE")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    module, _, name = args.tree.partition(":")
    make, figures = getattr(importlib.import_module(module), name), Figures()
    for part in args.only:
        PARTS[part](make, figures)
    width = max(map(len, figures))
    for figure, value in figures.items():
        print(f"{figure:<{width}}  {value}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"tree": args.tree, "figures": figures}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
