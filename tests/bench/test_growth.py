"""The table of growth: each operation does, at a small size, what its row says."""

import importlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybrid.cache.cache import HybridCache
from support.calls import calls_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("growth")


@pytest.fixture
def caches(growth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[HybridCache]:
    """The caches that operations have made."""
    made: list[HybridCache] = []

    def keep(*sizes: Any, **options: Any) -> HybridCache:
        made.append(growth_cache(*sizes, **options))
        return made[-1]

    growth_cache = growth.cache_of
    monkeypatch.setattr(growth, "cache_of", keep)
    return made


def cost(works: Iterator[Any]) -> tuple[int, int]:
    """Calls of an operation, and bytes that it takes in Python's memory: the least of some."""
    calls = min(calls_of(work) for work in islice(works, 12))
    tracemalloc.start()
    try:
        return calls, min(bytes_taken(work) for work in islice(works, 4))
    finally:
        tracemalloc.stop()


def bytes_taken(work: Callable[[], Any]) -> int:
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    work()
    return tracemalloc.get_traced_memory()[1] - before


def evicted_and_moved(works: Iterator[Any], caches: list[HybridCache], times: int) -> list[tuple[int, int]]:
    """Return what each of the first operations evicted and moved."""
    found = []
    for work, _ in zip(works, range(times), strict=False):
        before = caches[-1].stats()
        work()
        after = caches[-1].stats()
        found.append((after.evicted_pages - before.evicted_pages, after.moved_pages - before.moved_pages))
    caches[-1].audit()
    return found


@pytest.mark.parametrize("name", ["requests", "pins", "nodes"])
def test_a_shortage_evicts(growth: ModuleType, caches: list[HybridCache], name: str) -> None:
    works = growth.requests("lhd", 30) if name == "nodes" else growth.shortage_beside(name == "pins", 20)
    assert all(evicted for evicted, _ in evicted_and_moved(works, caches, 30))


@pytest.mark.parametrize(("name", "size"), [("move_pages", 30), ("move_checkpoints", 300)])
def test_units_are_moved_and_nothing_is_evicted(
    growth: ModuleType, caches: list[HybridCache], name: str, size: int
) -> None:
    found = evicted_and_moved(getattr(growth, name)(size), caches, 30)
    assert not any(evicted for evicted, _ in found)
    assert all(moved for _, moved in found)


def test_the_exponent_is_that_of_the_figures(
    growth: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "fastest", lambda size: float(size**2))
    monkeypatch.setattr(growth, "OPERATIONS", {"an operation": (lambda size: size, (1, 10, 100), (1000,))})
    for arguments, sizes in (([], 3), (["--full"], 4)):
        monkeypatch.setattr("sys.argv", ["growth.py", "--json", *arguments])
        assert growth.main() == 1
        (line,) = json.loads(capsys.readouterr().out)["lines"]
        assert line["value"] == pytest.approx(2)
        assert len(line["medians"]) == sizes


ROWS = (
    "evict a page of a leaf, by its tokens",
    "recall a prompt, by checkpoints above",
    "commit a page, by pages before it",
    "open below a chain of commits, by its length",
    "request in a shortage, by running requests",
    "request in a shortage, by pins",
    "move pages together, by running requests",
    "move stored checkpoints together, by nodes",
    "request with lru, by nodes",
    "request with lhd, by nodes",
    "request with flop_aware, by nodes",
)
"""All that are measured."""


def test_the_cost_of_every_row_is_counted(growth: ModuleType) -> None:
    assert tuple(growth.OPERATIONS) == ROWS


@pytest.mark.parametrize("name", ROWS)
def test_what_an_operation_costs_does_not_grow(growth: ModuleType, name: str) -> None:
    """Counted: its calls, and the memory that it takes meanwhile, which would be that of a copied edge."""
    make = growth.OPERATIONS[name][0]
    small, large = (1600, 160_000) if "a leaf" in name else (60, 960)
    (few, least), (many, most) = cost(make(small)), cost(make(large))
    assert many <= 1.2 * few
    assert most <= least + 2**14
