"""What figures are repeated with: traces of the same bytes everywhere, and operations that every tree can run."""

import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_a_trace_has_the_bytes_that_the_figures_were_taken_with(tmp_path: Path) -> None:
    subprocess.run([sys.executable, BENCH / "traces.py", "--out", tmp_path, "--only", "lmsys"], check=True)
    (file,) = tmp_path.iterdir()
    assert file.name == "lmsys.jsonl"
    known = "3c8039ca6ac58a995fd8a458545632b9e702fd0592430126781c2e92e735ee76"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == known


def test_the_known_figures_are_of_the_traces_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    traces, hit_rate = importlib.import_module("traces"), importlib.import_module("hit_rate")
    reference = json.loads((BENCH / "reference.json").read_text(encoding="utf-8"))
    assert len(reference["cells"]) == 30
    assert {cell["trace"] for cell in reference["cells"]} == set(traces.TRACES) == set(reference["infinite_cache"])
    for name, (kv, state) in hit_rate.GEOMETRIES.items():
        assert reference["geometries"][name] == {"kv_bytes_per_token": kv, "state_bytes": state}


def test_the_same_trace_on_our_tree_and_on_one_that_never_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH / "trees"))
    operations, ours, empty = (importlib.import_module(name) for name in ("operations", "hybrid_tree", "allocators"))
    trace = operations.make_trace(requests=300, prompts=10)
    for make, hits in ((ours.HybridTree, True), (empty.EmptyTree, False)):
        run = operations.Mixed(make(page_size=64, kv_slots=30 * 1024, state_slots=64))
        for ids in trace:
            run.request(ids)
            run.check()
        assert (run.hit_tokens > run.num_tokens // 4) == hits
        assert ("evict_kv" in run.times) == hits


def test_figures_of_one_tree_are_written(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, BENCH / "trees" / "operations.py", "hybrid_tree:HybridTree", "--only", "lock"]
    subprocess.run([*command, "--json", file], check=True, capture_output=True)
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert set(figures) == {f"{name} depth{depth}" for name in ("lock", "unlock") for depth in (1, 10, 100)}
    assert all(0 < value < 1000 for value in figures.values())
