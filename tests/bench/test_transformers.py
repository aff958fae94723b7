"""The benchmarks against transformers, on a model and on prompts small enough for a test: every line is measured."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybrid import CacheConfig, Engine

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
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Imports a program and gives it sizes for a test."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(importlib.import_module("model"), "SIZES", TINY)

    def imported(name: str, **sizes: Any) -> ModuleType:
        module = importlib.import_module(name)
        for constant, value in sizes.items():
            monkeypatch.setattr(module, constant, value)
        return module

    yield imported
    for name in ("model", "prefix_reuse", "hf", "cpu", "tiers"):
        sys.modules.pop(name, None)


def assert_every_line_is_measured(lines: list[Any], count: int) -> None:
    assert len({(line.name, line.part) for line in lines}) == len(lines) == count
    assert all(line.value > 0 and min(line.medians.values()) > 0 for line in lines)


def test_the_engine_against_transformers(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    program = load("prefix_reuse", SHARED=256, NEW=8, COLD=64, GROUP_SHARED=64, GROUP_OWN=4, GROUP_NEW=2, DECODED=6)
    theirs = load("model").save_random_model(tmp_path)
    assert_every_line_is_measured(program.measure(tmp_path, theirs, 1), 8)


def test_host_memory_against_the_device(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    tiers = load("tiers", SIZES=(128,), SHARED=256, NEW=8)
    load("model").save_random_model(tmp_path)
    assert_every_line_is_measured(tiers.measure(tiers.Tiers(tmp_path), 1), 13)


def test_the_cache_inside_transformers(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    hf = load("hf", TURN=300, ANSWER=3, SHORT=8, COLD=(64,))
    sides = hf.Sides(load("model").save_random_model(tmp_path))
    assert_every_line_is_measured(hf.measure(sides, 2), 11)


def test_short_turns_of_small_models_inside_transformers(load: Callable[..., ModuleType]) -> None:
    hf = load("hf", SHORT=20, CACHED=128, NEW=64, FOLLOWING=3, FEW=2)
    lines = hf.of_small_models(Namespace(threads=1, runs=1))
    assert_every_line_is_measured(lines, 12)
    assert len({line.part for line in lines}) == 3


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_family_against_qwen(dtype: str, load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = load("cpu", PROMPT=64, OWN=8, STEPS=6)
    monkeypatch.setattr(load("model"), "OF_FAMILIES", {"qwen3_5_text": {}, "kimi_linear": {}})
    lines = cpu.of_family("kimi_linear", cpu.how(dtype), 1)
    assert_every_line_is_measured(lines, 3)
    assert [line.details["captured"] for line in lines[:2]] == [True, True]


def test_the_engine_against_llama_cpp_without_it(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    cpu = load("cpu", PROMPT=64, SHARED=128, OWN=8, STEPS=6, CLIENTS=3, NEW=2)
    load("model").save_random_model(tmp_path)
    load_engine = partial(Engine.from_pretrained, tmp_path, cache=CacheConfig(memory="64MiB"))
    engine = load_engine()
    lines = cpu.against_llama(engine, None, 1, "float32")
    assert [line.medians["ours"] > 0 and not line.reached for line in lines] == [True] * 4
    (line,) = cpu.against_server(engine, None, 1)
    assert line.medians["ours"] > 0 and not line.reached
    assert_every_line_is_measured(cpu.against_transformers(tmp_path, 1, ("float32", "int8")), 8)
    assert_every_line_is_measured(cpu.of_modes(engine, 1), 3)
    assert_every_line_is_measured(cpu.of_threads(engine, 1, 4), 4)
    assert_every_line_is_measured(cpu.decays(1, tokens=64, heads=2, size=16), 1)
    lines = cpu.costs(engine, load_engine, "float32")
    parts = {line.name.removeprefix("decode step: "): line.medians for line in lines}
    assert {cpu.PRODUCTS, cpu.REST, cpu.ALL} < set(parts)
    whole = parts.pop(cpu.ALL)
    for side in ("torch", "compiled"):
        assert sum(medians[side] or 0 for medians in parts.values()) == pytest.approx(whole[side])
