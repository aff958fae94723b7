"""The levels that operations are compiled for: which one is taken, and products by AMX where the CPU has it."""

import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.kernels.cpu.target import FEATURES, LEVELS, VARIABLE, level_of

ROOT = Path(__file__).parents[2]

AVX2 = frozenset(("+avx", "+fma"))
ZEN = AVX2 | {"+avx512f", "+avx512bw", "+avx512bf16"}
XEON = ZEN | {"+avx512fp16", "+amx-tile", "+amx-bf16"}


def allowed() -> bool:
    return True


def refused() -> bool:
    return False


@pytest.mark.parametrize(
    ("features", "asked", "level"),
    [
        (frozenset(), "", "generic"),
        (AVX2, "", "avx2"),
        (AVX2 | {"+avx512f"}, "", "avx512"),
        (ZEN, "", "avx512_bf16"),
        (XEON, "", "avx512"),
        (XEON, "avx512_bf16", "avx512_bf16"),
        (XEON, "amx", "amx"),
        (ZEN, "avx2", "avx2"),
        (frozenset(("+neon",)), "", "neon"),
    ],
)
def test_it_is_chosen_by_what_the_cpu_has_or_named(features: frozenset[str], asked: str, level: str) -> None:
    assert level_of(features, asked, allowed) == level


@pytest.mark.parametrize("asked", ["amx", "avx1024"])
def test_one_that_the_cpu_lacks_is_an_error_that_names_those_there(asked: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} must be one of avx512_bf16, avx512, avx2, .*got '{asked}'"):
        level_of(ZEN, asked, allowed)


def test_without_permission_the_next_one_is_taken_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert level_of(XEON, "amx", refused) == "avx512"
    assert "the system refuses the registers of amx: operations are compiled for avx512" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "HYBRID_KERNELS": "auto", "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], env=variables, capture_output=True, text=True, check=False
    )


def test_an_engine_says_which_levels_there_are() -> None:
    ended = run("-m", "hybrid", "generate", "tiny", "a", HYBRID_CPU_LEVEL="avx1024")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert f"{VARIABLE} must be one of" in ended.stderr


PROGRAM = str(ROOT / "tests" / "support" / "products_by_amx.py")


@pytest.mark.skipif(not LEVELS["amx"] <= FEATURES, reason="this CPU has no AMX")
def test_products_by_amx_have_one_order_of_sums_and_no_row_depends_on_others() -> None:
    """The order of Intel's manual."""
    ended = run(PROGRAM, HYBRID_CPU_LEVEL="amx")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    if found["level"] != "amx":
        pytest.skip("the system refuses the registers of AMX")
    assert found["wrong"] == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled for x86-64")
def test_products_by_amx_are_compiled_to_its_instructions_on_any_cpu(tmp_path: Path) -> None:
    described = ",".join(sorted(FEATURES - {"-amx-tile", "-amx-bf16"} | LEVELS["amx"]))
    cpu = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": described, "NUMBA_CACHE_DIR": str(tmp_path)}
    ended = run(PROGRAM, "compile", HYBRID_CPU_LEVEL="amx", **cpu)
    assert ended.returncode == 0, ended.stderr
    instructions = ["ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"]
    assert json.loads(ended.stdout) == {"level": "amx", "instructions": instructions}
