"""The benchmark of hit rates: on traces small enough to count by hand."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = 64


@pytest.fixture
def hit_rate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("hit_rate")


def write(path: Path, requests: list[tuple[list[int], list[int]]]) -> str:
    lines = [json.dumps({"input_tokens": ids, "output_tokens": out}) for ids, out in requests]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(hit_rate: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert hit_rate.main([*arguments, "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    return {**line["details"], "hit": line["value"]}


def test_a_trace_is_counted_to_the_token(
    hit_rate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat of two turns, and a prompt that shares 100 tokens with it."""
    first = list(range(150))
    turns = [(first, [7] * 50), (first + [7] * 50 + [8] * 100, [9] * 10), (first[:100] + [3] * 100, [4])]
    trace = write(tmp_path / "chat.jsonl", turns)
    result = run(hit_rate, capsys, "--trace", trace, "--budget-gb", "1", "--geometry", "qwen35_4b", "--audit")
    assert result["requests"] == 3
    assert result["hit"] == round(100 * (0 + 192 + 64) / (150 + 300 + 200), 2)


@pytest.mark.parametrize("policy", ["lhd", "lru", "flop_aware", "mru"])
def test_a_trace_gives_the_same_figures_again_and_more_memory_hits_more(
    hit_rate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    histories: dict[int, list[int]] = {}
    requests = []
    for at in range(60):
        chat = at * 7 % 5
        ids = [*histories.get(chat, [chat]), *[at] * (40 + at % 90)]
        out = [at + 1000] * (20 + at % 50)
        requests.append((ids, out))
        histories[chat] = ids + out if at % 11 else ids[: len(ids) // 2]
    trace = write(tmp_path / "chats.jsonl", requests)
    custom = ["--geometry", "1000,1500000", "--budget-gb", "0.02"]
    first = run(hit_rate, capsys, "--trace", trace, *custom, "--policy", policy, "--audit")
    again = run(hit_rate, capsys, "--trace", trace, *custom, "--policy", policy)
    assert first["evicted_checkpoints"] > 0
    assert {**first, "us_per_request": 0} == {**again, "us_per_request": 0}
    endless = run(hit_rate, capsys, "--trace", trace, "--budget-gb", "inf")
    assert endless["hit"] > first["hit"] > 0


def test_a_policy_of_ones_own_is_measured(
    hit_rate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_policy.py").write_text(
        "from hybrid import Policy\nclass Newest(Policy):\n    def rank(self, facts): return -facts.last_used\n"
    )
    monkeypatch.chdir(tmp_path)
    trace = write(tmp_path / "few.jsonl", [([at * 5 % 12] * 70, [1]) for at in range(60)])
    custom = ["--trace", trace, "--geometry", "100,1000000", "--budget-gb", "0.006"]
    hits = [run(hit_rate, capsys, *custom, "--policy", name)["hit"] for name in ("own_policy:Newest", "mru", "lru")]
    assert hits[0] == hits[1] != hits[2]
    with pytest.raises(SystemExit, match="a class 'Older' in a module 'own_policy'"):
        run(hit_rate, capsys, *custom, "--policy", "own_policy:Older")


def test_stored_checkpoints_hit_more_in_the_same_memory(
    hit_rate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[n] * 70 for n in range(12)]
    trace = write(tmp_path / "few.jsonl", [(prompts[at * 5 % 12], [1]) for at in range(120)])
    custom = ["--geometry", "100,1000000", "--budget-gb", "0.008"]
    rates = [
        run(hit_rate, capsys, "--trace", trace, *custom, "--state-dtype", name)["hit"] for name in ("float32", "int8")
    ]
    assert rates[1] > rates[0] + 10


def test_a_file_of_known_figures_is_run_cell_by_cell(
    hit_rate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one.jsonl", [(list(range(200)), [5] * 70), (list(range(200)), [6])])
    cell = {"geometry": "nv7b", "trace": "one", "budget_gb": 1.0, "lru": 40.0, "marconi": 41.0}
    endless = {"one": {"any_token": 50.0, "checkpoint_every_64": 48.0, "marconi_admission": 50.0}}
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"cells": [cell], "infinite_cache": endless}), encoding="utf-8")
    assert hit_rate.main(["--reference", str(reference), "--traces", str(tmp_path), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    found = [(line["name"], line["value"], line["target"], line["reached"]) for line in lines]
    assert found == [("one, 1 GB", 48.0, 38.0, True), ("one, endless memory", 48.0, 47.5, True)]
    assert lines[0]["medians"]["Marconi"] == 41.0
    assert hit_rate.main(["--reference", str(reference), "--traces", str(tmp_path)]) == 0
    assert "Marconi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "nowhere", "--budget-gb", "1"], "nowhere"),
        (["--trace", "x"], "--budget-gb"),
        (["--trace", "x", "--budget-gb", "nan"], "--budget-gb must be a positive number"),
        (["--trace", __file__, "--budget-gb", "0.0001"], "line 1"),
        (["--trace", "x", "--geometry", "65536", "--budget-gb", "1"], "two numbers of bytes"),
    ],
)
def test_what_is_missing_is_named(
    hit_rate: ModuleType,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HYBRID_TRACES", raising=False)
    with pytest.raises(SystemExit) as stopped:
        hit_rate.main(arguments)
    assert says in f"{stopped.value} {capsys.readouterr().err}"


def test_a_line_that_is_no_request_is_named(hit_rate: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"input_tokens": [1], "output_tokens": [2]}\n{"input": 3}\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="line 2"):
        hit_rate.main(["--trace", str(path), "--budget-gb", "1"])
