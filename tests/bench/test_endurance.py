"""The short version of `bench/endurance.py`: what ended leaves nothing, and what grows is found."""

import importlib
from collections import Counter
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybrid import Engine, EngineConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def endurance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    script = importlib.import_module("endurance")
    for name, size in script.BOUNDS.items():
        monkeypatch.setattr(name, min(size, 16))
    return script


def test_of_requests_of_all_sorts_nothing_is_left(endurance: ModuleType, tiny: Engine, tmp_path: Path) -> None:
    config = EngineConfig(**endurance.LIMITS)
    engine = tiny.with_cache(endurance.settings(tmp_path, disk="2MiB"), config=config, speculation="cache")
    traffic, held = endurance.Traffic(0, ()), []
    for number in (80, 150):
        endurance.stepped(engine, traffic, number)
        held.append(endurance.Held.now())
    engine.close()
    more = held[1].objects - held[0].objects
    own = {kind: grown for kind, grown in more.items() if kind.__module__.startswith("hybrid.")}
    own = {kind: grown for kind, grown in own.items() if "kernels" not in kind.__module__}  # parts of captured passes
    assert max(own.values()) < 50, own
    assert held[1].threads == held[0].threads


@pytest.mark.parametrize(
    ("what", "missed"),
    [("", []), ("bytes", ["bytes of each"]), ("blocks", ["blocks of each"]), ("files", ["open files more"])],
)
def test_what_grows_is_a_figure_that_is_missed(
    endurance: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str, missed: list[str]
) -> None:
    number = count(1)

    def held() -> Any:
        more = {what: 10**6 * next(number)} if what else {}
        return endurance.Held(**{"bytes": 1, "objects": Counter(), "blocks": 1, "threads": 1, "files": 1, **more})

    monkeypatch.setattr(endurance.Held, "now", held)
    found = endurance.watch("requests", iter(range(1000, 7000, 1000)), 6000)
    assert [line.name for line in found if not line.reached] == missed
