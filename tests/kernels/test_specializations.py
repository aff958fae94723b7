"""The variants that Triton compiles are few, and compiled when an engine starts: no size of a step needs another."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no triton for this platform, and so nothing to compile")

TOOL = Path(__file__).parents[1] / "support" / "specializations.py"

MOST = {"fast": 50, "deterministic": 60}
"""Variants of all kernels together, mixtures of experts included."""

KINDS = ("dense", "experts", "dense, drafts", "predictor", "int8, drafts", "fp8")
"""Models, with drafts and with pages of other types."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what the tool prints, with 25 random steps for each kind of engine and mode."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, str(TOOL), "25"], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


@pytest.mark.parametrize("mode", MOST)
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_needs_a_kernel_that_was_not_compiled_at_the_start(found: dict[str, Any], kind: str, mode: str) -> None:
    own = found[f"{kind}, {mode}"]
    assert own["new"] == []
    assert sum(own["more"].values()) >= 20  # the steps did launch kernels
    assert sum(own["warm"].values()) <= MOST[mode]


def test_the_tool_notices_an_integer_that_is_specialized(found: dict[str, Any]) -> None:
    """The same kernels, if the number of rows were specialized."""
    assert all(own["undone"] > 5 for own in found.values())
