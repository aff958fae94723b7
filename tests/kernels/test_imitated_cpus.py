"""The promised bits on other CPUs than the one at hand: libraries are asked to take the code that they have for those,
and Numba to compile for them.

Which settings of libraries change something depends on the machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybrid.commands.random_checkpoints import write_random_checkpoint

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "imitated.py"

HERE = "this CPU"

SETTINGS: dict[str, dict[str, str]] = {
    "an old CPU": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Prescott",
    },
    "a CPU with AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
}
"""Of each library: no promised bit comes from one, so that all may change at once."""

THREADS = {HERE: (1, 2), "an old CPU": (1,), "a CPU with AVX2": (2,)}
FAMILIES = {1: "qwen3_5_text, odd sizes", 2: "qwen3_next, odd sizes"}
"""The checkpoint by number of threads."""

TARGETS: dict[str, dict[str, str]] = {
    "a CPU without AVX2": {"NUMBA_CPU_NAME": "generic"},
    "a CPU with AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"},
}

ENGINE = {"a CPU without AVX2"}
"""Targets on which hits of an engine are checked, too: a minute each, in which all of its operations are compiled."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {threads: str(write_random_checkpoint(folder / str(threads), name)) for threads, name in FAMILIES.items()}


VARIABLES = {variable for settings in SETTINGS.values() for variable in settings}


def run(settings: Mapping[str, str], threads: int, *arguments: str) -> dict[str, Any]:
    """Return what the program finds under these settings."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {
        **settings,
        "OMP_NUM_THREADS": str(threads),
        "HYBRID_KERNELS": "auto",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


Results = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(checkpoints: dict[int, str]) -> Results:
    """Return what was found, by settings and threads; each is run once."""

    @cache
    def found(name: str, threads: int) -> dict[str, Any]:
        here = () if name == HERE else (found(HERE, threads)["plain"],)
        return run(SETTINGS.get(name, {}), threads, checkpoints[threads], *here)

    return found


@pytest.mark.parametrize(("name", "threads"), [(name, count) for name, counts in THREADS.items() for count in counts])
def test_bits_do_not_depend_on_the_batch(name: str, threads: int, results: Results) -> None:
    found = results(name, threads)
    if name != HERE and found["plain"] == results(HERE, threads)["plain"]:
        return  # the code that runs is that of this CPU
    assert found["broken"] == []
    assert found["wrong"] == []
    assert found["is_dot_invariant"]


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_compiled_for_other_cpus_has_the_bits_of_this_one(
    name: str, checkpoints: dict[int, str], results: Results
) -> None:
    found = run(TARGETS[name], 1, checkpoints[1] if name in ENGINE else "", "another")
    assert found["broken"] == []
    assert found["compiled"] == results(HERE, 1)["compiled"]
    assert found["wrong"] == []


def test_a_setting_changes_the_code_that_runs(results: Results) -> None:
    assert results("an old CPU", 1)["plain"] != results(HERE, 1)["plain"]
