"""The model of this package's cache hits what a `HybridCache` hits."""

import importlib
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid import CacheConfig, CacheMemory, HybridCache
from hybrid.doctor import Sizes
from hybrid.doctor.engines import engine_of
from hybrid.doctor.own import GRID, PAGE, OwnCache
from hybrid.doctor.request import UNIT, LoggedRequest, hashed
from hybrid.key import Key
from hybrid.units import ceil_div

BENCH = str(Path(__file__).parents[2] / "bench")
SIZES = Sizes(32768, 51511296)


def imported(name: str) -> Any:
    if BENCH not in sys.path:
        sys.path.append(BENCH)
    return importlib.import_module(name)


@cache
def requests() -> list[LoggedRequest]:
    made = imported("traces").make("lmsys")[:300]
    both = [(one["input_tokens"], one["output_tokens"]) for one in made]
    return [LoggedRequest(hashed(given + answer), len(given), len(given) + len(answer)) for given, answer in both]


def hits_of_the_cache(eviction: str, memory: int) -> list[int]:
    indices = CacheMemory.of_bytes(memory, PAGE * SIZES.token_bytes, SIZES.state_bytes)
    real = HybridCache(indices, CacheConfig(page_size=GRID, chunk_size=GRID, eviction=eviction))
    serve, found = imported("hit_rate").serve, []
    for one in requests():
        ids = np.frombuffer(one.hashes, np.uint64).astype(np.uint32).tobytes()
        found.append(UNIT * serve(real, Key(ids), ceil_div(one.num_prompt, UNIT), one.num_tokens // UNIT)[0])
    return found


@pytest.mark.parametrize(("engine", "eviction"), [("lru", "lru"), ("marconi", "flop_aware"), ("hybrid", "lhd")])
def test_it_hits_what_the_cache_hits(engine: str, eviction: str) -> None:
    model = engine_of(engine, SIZES, 3_000_000_000)
    ours, theirs = [model.serve(one).num_tokens for one in requests()], hits_of_the_cache(eviction, 3_000_000_000)
    total = sum(one.num_prompt for one in requests())
    assert sum(theirs) > 0.1 * total
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= (25 if engine == "hybrid" else 1)
    assert abs(sum(ours) - sum(theirs)) <= 0.005 * total


def test_nothing_is_held_when_nothing_runs() -> None:
    model = OwnCache(SIZES, 1_000_000_000)
    for one in requests()[:60]:
        model.serve(one)
    assert model.check() == []


def test_both_learn_the_same_rhythm_of_paths() -> None:
    memory, times = 3_000_000_000, iter(range(1000))
    model = OwnCache(SIZES, memory)
    indices = CacheMemory.of_bytes(memory, PAGE * SIZES.token_bytes, SIZES.state_bytes)
    real = HybridCache(indices, CacheConfig(page_size=GRID, chunk_size=GRID))
    real.use_clock(lambda: 5.0 * next(times))
    for number, one in enumerate(requests()[:200]):
        model.serve(replace(one, time=5.0 * number))
        ids = np.frombuffer(one.hashes, np.uint64).astype(np.uint32).tobytes()
        imported("hit_rate").serve(real, Key(ids), ceil_div(one.num_prompt, UNIT), one.num_tokens // UNIT)
    ours, theirs = (tree.candidates.rhythm for tree in (model.tree, real.tree))
    assert ours is not None and theirs is not None and ours.is_known and theirs.is_known
    of_ours, of_theirs = (rhythm.counts.sum(axis=(1, 2)) for rhythm in (ours, theirs))
    assert of_ours[0] > 20
    assert of_ours == pytest.approx(of_theirs, rel=0.05)
