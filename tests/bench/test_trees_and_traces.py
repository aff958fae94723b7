"""The means to repeat figures: traces of the same bytes everywhere, and operations that every tree can run."""

import hashlib
import importlib
import json
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybrid.tree.policies import policy_of
from hybrid.tree.tree import Tree
from support.calls import calls_of

BENCH = Path(__file__).parents[2] / "bench"


def test_a_trace_has_the_bytes_that_the_figures_were_taken_with(tmp_path: Path) -> None:
    subprocess.run([sys.executable, BENCH / "traces.py", "--out", tmp_path, "--only", "lmsys"], check=True)
    (file,) = tmp_path.iterdir()
    assert file.name == "lmsys.jsonl"
    known = "3c8039ca6ac58a995fd8a458545632b9e702fd0592430126781c2e92e735ee76"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == known


def test_the_known_figures_are_of_the_traces_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    traces = importlib.import_module("traces")
    reference = json.loads((BENCH / "reference.json").read_text(encoding="utf-8"))
    assert len(reference["cells"]) == 30
    assert {cell["trace"] for cell in reference["cells"]} == set(traces.TRACES) == set(reference["infinite_cache"])
    targets = {cell["trace"]: cell["target"] for cell in reference["cells"] if "target" in cell}
    assert targets.keys() == traces.TRACES.keys()
    assert targets["swebench_nc"] == 58


def operations_of(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH / "trees"))
    return importlib.import_module("operations")


def test_our_tree_serves_the_trace_of_mixed_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = operations_of(monkeypatch)
    run = operations.Mixed(importlib.import_module("hybrid_tree").HybridTree(64, 30 * 1024, 64))
    for ids in operations.make_trace(requests=300, prompts=10):
        run.request(ids)
        run.tree.check()
    assert run.hit_tokens > run.num_tokens // 4
    assert run.evicted_tokens > 0


def test_a_request_of_the_mixed_trace_costs_a_bounded_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It matches, locks and unlocks twice, inserts, and evicts a checkpoint and half a leaf: 160, with the benchmark's
    own."""
    operations = operations_of(monkeypatch)
    run = operations.Mixed(importlib.import_module("hybrid_tree").HybridTree(64, 30 * 1024, 64))
    first, *rest = operations.make_trace(requests=300, prompts=10)
    run.request(first)
    calls = calls_of(lambda: [run.request(ids) for ids in rest])
    assert run.evicted_tokens > 0
    assert calls < 175 * len(rest)


def test_lhd_makes_less_than_twice_the_calls_that_lru_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 384 states, of which an eviction looks at a sample, and the guard, a tenth of the calls. The bound is lower
    than two: the arithmetic of the tables is more than its calls."""
    operations, calls = operations_of(monkeypatch), {}
    trace = operations.make_trace(requests=1200)
    for policy in ("lru", "lhd"):
        ours = importlib.import_module("hybrid_tree").HybridTree(64, 64 * 1024, 384)
        ours.tree = Tree(64, 64, policy_of(policy), max_ghosts=0)
        run = operations.Mixed(ours)
        for ids in trace[:700]:
            run.request(ids)
        calls[policy] = calls_of(partial(deque, map(run.request, trace[700:1000]), 0))
    assert calls["lru"] < calls["lhd"] < 1.95 * calls["lru"]


def test_a_trace_of_mixed_operations_has_conversations_of_three_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = operations_of(monkeypatch).make_trace(requests=30, prompts=4, live_max=5)
    assert [sorted(map(len, trace)).count(length) for length in (1224, 1424, 1624)] == [10, 10, 10]
    begun = {tuple(ids[:1024]) for ids in trace}
    assert len(begun) <= 4
    for ids in trace:
        assert len(ids) == 1224 or any(list(ids[:-200]) == list(other) for other in trace[: trace.index(ids)])


def test_figures_of_one_tree_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    command = [sys.executable, BENCH / "trees" / "operations.py", "hybrid_tree:HybridTree", "lock"]
    figures = importlib.import_module("common").printed(command)
    assert set(figures) == {"lock + unlock, depth 1", "lock + unlock, depth 100"}
    assert all(0 < value < 1000 for value in figures.values())


def test_sides_take_turns_and_every_figure_has_a_goal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On figures of two sides that are made up: of times the smaller is better, of rates the larger."""
    monkeypatch.syspath_prepend(str(BENCH))
    tree, taken = importlib.import_module("tree"), []

    def run(args: Any, side: str, *command: Any) -> dict[str, Any]:
        if command[0] != tree.OPERATIONS:
            return {"version": "0"}
        taken.append((side, command[-1]))
        value = {"theirs": 60.0, "ours": 10.0}[side] * (1 + len(taken) // 4)
        return {name: value for name in tree.GOALS if name.startswith(command[-1])}

    monkeypatch.setattr(tree, "run", run)
    monkeypatch.setattr("sys.argv", ["tree.py", "--runs", "3", "--only", "lock", "evict", "--json"])
    assert tree.main() == 1
    assert taken == [("theirs", "lock"), ("ours", "lock"), ("theirs", "evict"), ("ours", "evict")] * 3
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines.keys() == {name for name in tree.GOALS if name.startswith(("lock", "evict"))}
    assert lines["lock + unlock, depth 1"]["value"] > 2
    assert lines["evict leaves in bulk: leaves/s"]["value"] < 1
    assert lines["evict leaves in bulk: leaves/s"]["target"] == 3


def test_inside_sglang_times_are_over_those_of_the_rust_core(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On figures that are made up."""
    monkeypatch.syspath_prepend(str(BENCH))
    program, taken = importlib.import_module("in_sglang"), []

    def printed(command: list[Any]) -> dict[str, float]:
        name, side = command[-2:]
        taken.append((name, side))
        return {"hits": 30.0, "us": {"rust": 100.0, "lru": 110.0, "lhd": 250.0}[side]}

    monkeypatch.setattr(program, "printed", printed)
    monkeypatch.setattr("sys.argv", ["in_sglang.py", "--traces", "traces", "--runs", "2", "--json"])
    assert program.main() == 1
    sides = ["rust", "lru", "lhd"] * 2
    compared = [(name, side) for name in ("scan", "loop", "switch") for side in ("rust", "lhd")]
    assert taken == [*((name, side) for name in ("lmsys", "swebench") for side in sides), *compared]
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert [lines[f"lmsys, {side}"]["value"] for side in ("rust", "lru", "lhd")] == [1.0, 1.1, 2.5]
    assert [lines[f"lmsys, {side}"]["reached"] for side in ("lru", "lhd")] == [True, False]
