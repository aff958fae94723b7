"""The benchmarks against transformers, on a model and on prompts small enough for a test: every line is measured."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture
def prefix_reuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module = importlib.import_module("prefix_reuse")
    sizes = {
        "SIZES": TINY,
        "SHARED": 256,
        "NEW": 8,
        "COLD": 64,
        "GROUP_SHARED": 64,
        "GROUP_OWN": 4,
        "GROUP_NEW": 2,
        "DECODED": 6,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    yield module
    for name in ("prefix_reuse", "hf", "cpu", "tiers"):
        sys.modules.pop(name, None)


def assert_every_line_is_measured(lines: list[Any], count: int) -> None:
    assert len({(line.name, line.part) for line in lines}) == len(lines) == count
    assert all(line.value > 0 and min(line.medians.values()) > 0 for line in lines)


def test_the_engine_against_transformers(prefix_reuse: ModuleType, tmp_path: Path) -> None:
    theirs = prefix_reuse.save_random_model(tmp_path)
    lines = prefix_reuse.measure(prefix_reuse.Sides(tmp_path, theirs), 1)
    assert_every_line_is_measured(lines, 8)


def test_host_memory_against_the_device(
    prefix_reuse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = importlib.import_module("tiers")
    monkeypatch.setattr(tiers, "SIZES", (128,))
    sides = prefix_reuse.Sides(tmp_path, prefix_reuse.save_random_model(tmp_path))
    assert_every_line_is_measured(tiers.measure(tiers.Tiers(sides, tmp_path), 1), 10)


def test_the_cache_inside_transformers(
    prefix_reuse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = importlib.import_module("hf")
    for name, value in {"TURN": 300, "ANSWER": 3, "SHORT": 8, "COLD": (64,)}.items():
        monkeypatch.setattr(hf, name, value)
    sides = hf.Sides(prefix_reuse.save_random_model(tmp_path))
    assert_every_line_is_measured(hf.measure(sides, 2), 11)


def test_the_engine_against_llama_cpp_without_it(
    prefix_reuse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = importlib.import_module("cpu")
    for name, value in {"PROMPT": 64, "SHARED": 128, "OWN": 8, "STEPS": 6}.items():
        monkeypatch.setattr(cpu, name, value)
    prefix_reuse.save_random_model(tmp_path)
    ours = cpu.Ours(tmp_path, "float32")
    lines = cpu.against_llama(ours, None, 1, 0)
    assert [line.medians["ours"] > 0 and not line.reached for line in lines] == [True] * 4
    assert_every_line_is_measured(cpu.of_threads(ours, 1), 4)
    parts = cpu.costs(ours)
    assert {"decode step: multiply", "decode step: step", "decode step: torch"} <= {line.name for line in parts}
    assert sum(line.value for line in parts) == pytest.approx(1)
