"""The models of engines give the hits that the engines' own schedulers gave (`bench/doctor.py --record`): vLLM 0.33.0,
SGLang 0.5.23, a Qwen3.5-4B's geometry, two of the seeds new to the models."""

import importlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybrid.doctor import Sizes
from hybrid.doctor.engines import engine_of
from hybrid.doctor.request import LoggedRequest, hashed

RECORDED = Path(__file__).parent / "recorded"
FIRST = 150  # of each recording: the rest takes seconds, and `bench/doctor.py --check` compares it
CELLS = [
    (path.stem, cell, hits[:FIRST])
    for path in sorted(RECORDED.glob("*.json"))
    for cell, hits in json.loads(path.read_text())["hits"].items()
]


@cache
def requests_of(trace: str, first: int) -> list[LoggedRequest]:
    sys.path.append(str(RECORDED.parents[2] / "bench"))
    name, _, seed = trace.partition("@")
    made: list[dict[str, Any]] = importlib.import_module("traces").make(name, int(seed) if seed else None)[:first]
    both = [(one["input_tokens"], one["output_tokens"]) for one in made]
    return [LoggedRequest(hashed(given + answer), len(given), len(given) + len(answer)) for given, answer in both]


@pytest.mark.parametrize(("engine", "cell", "hits"), CELLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_hits_what_the_engine_hit(engine: str, cell: str, hits: list[int]) -> None:
    trace, gigabytes = cell.split(":")
    model = engine_of(engine, Sizes(32768, 51511296), int(float(gigabytes) * 1e9))
    ours = [model.serve(request).num_tokens for request in requests_of(trace, len(hits))]
    assert sum(hits) > 0
    assert ours == hits
