"""The table of hit rates in docs/sglang.md, measured again: two minutes."""

import importlib
import re
import sys
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.sglang_absent import require_sglang

require_sglang()

from support.sglang_served import Served, Setting, budget  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


def table() -> list[tuple[str, float, bool, float]]:
    """Trace, gigabytes, whether memory is unified, and the hit rate of this backend: rows as the page has them."""
    row = re.compile(r"^\| (\w+), (\d+) GB \|(?: [\d.]+ \|){2} ([\d.]+) \| [\d.]+ \| ([\d.]+) \|$", re.MULTILINE)
    found = row.findall((ROOT / "docs/sglang.md").read_text(encoding="utf-8"))
    assert len(found) == 3
    return [(name, float(gb), bool(at), float(value)) for name, gb, *both in found for at, value in enumerate(both)]


@cache
def trace(name: str) -> list[dict[str, Any]]:
    sys.path.append(str(ROOT / "bench"))
    made: list[dict[str, Any]] = importlib.import_module("traces").make(name)
    return made


@pytest.mark.parametrize(("name", "gigabytes", "unified", "shown"), table(), ids=str)
def test_a_hit_rate_is_the_one_that_is_shown(name: str, gigabytes: float, unified: bool, shown: float) -> None:
    served = Served(Setting("hybrid", None, *budget(gigabytes, 64), unified=unified))
    for request in trace(name):
        prompt = request["input_tokens"]
        served.serve(array("q", [*prompt, *request["output_tokens"]]), len(prompt))
    assert 100 * served.hit_tokens / served.prompt_tokens == pytest.approx(shown, abs=0.1)
    assert served.books() == []
