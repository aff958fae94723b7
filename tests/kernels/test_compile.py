"""Every Triton kernel compiles for a GPU that need not be there, at the sizes of Qwen3.5-9B in bfloat16, and fits it.

The interpreter runs kernels that a compiler would refuse, and says nothing of registers; here the compiler speaks. The
tools run in processes of their own, since kernels that are interpreted in this one cannot be compiled.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no triton for this platform, and so nothing to compile")

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "bench" / "gpu" / "resources.py"
VARIANTS = ROOT / "tests" / "support" / "variants.py"
H100_SHARED_MEMORY = 227 << 10

MATRIX_KERNELS = {
    "_prompt_kernel",
    "_decode_kernel",
    "_prompt_kernel_of_experts",
    "_decode_kernel_of_experts",
    "_attention",
    "_within_chunks",
    "_across_chunks",
}
"""Kernels whose work is matrix products: without tensor cores they are ten times as slow."""


def run(*arguments: str, tool: Path = TOOL, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(tool), *arguments], capture_output=True, text=True, env={**variables, **environment}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of compiled kernels."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(folder: Path) -> dict[str, Any]:
    """Return what the tool writes."""
    result = run("--json", str(folder / "found.json"), TRITON_CACHE_DIR=str(folder / "cache"))
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def launched() -> Iterator[str]:
    """Names of the kernels that the functions of ./kernels launch, as in `_kernel[grid](...)`."""
    for path in ROOT.glob("kernels/triton/**/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        jitted = {node.name for node in functions if any("triton.jit" in ast.unparse(x) for x in node.decorator_list)}
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        yield from jitted & {ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)}


def test_every_kernel_compiles(compiled: dict[str, Any]) -> None:
    assert compiled["failed"] == []
    assert {row["kernel"] for row in compiled["kernels"]} == set(launched())


def test_no_kernel_spills_registers(compiled: dict[str, Any]) -> None:
    assert [(row["operation"], row["case"], row["spills"]) for row in compiled["kernels"] if row["spills"]] == []


def test_every_kernel_fits_the_device(compiled: dict[str, Any]) -> None:
    for row in compiled["kernels"]:
        assert row["shared"] <= H100_SHARED_MEMORY, row
        assert row["resident"] >= 1, row


def test_kernels_of_matrix_products_use_tensor_cores(compiled: dict[str, Any]) -> None:
    by_name: dict[str, list[int]] = {}
    for row in compiled["kernels"]:
        by_name.setdefault(row["kernel"], []).append(row["hgmma"] + row["hmma"])
    assert set(by_name) >= MATRIX_KERNELS
    for name, counts in by_name.items():
        assert (min(counts) > 0) == (name in MATRIX_KERNELS), name


def test_matrix_products_of_prompts_use_the_instructions_of_the_device(compiled: dict[str, Any]) -> None:
    prompts = ("extend", "chunk rule", "2048 rows", "expert layer of 2048")
    rows = [row for row in compiled["kernels"] if row["case"].startswith(prompts) and row["hgmma"] + row["hmma"]]
    assert {row["kernel"] for row in rows} >= MATRIX_KERNELS - {"_decode_kernel", "_decode_kernel_of_experts"}
    for row in rows:
        assert row["hgmma"] > 0, row


def test_weights_are_read_past_the_registers_while_decoding(compiled: dict[str, Any]) -> None:
    rows = [row for row in compiled["kernels"] if row["kernel"].startswith("_decode_kernel")]
    assert len(rows) >= 6
    assert all(row["async_copies"] > 0 for row in rows)


def test_variants_that_must_give_the_same_bits_add_up_in_the_same_order(folder: Path) -> None:
    """The compiler decides by what it knows of addresses which thread has which numbers of a sum, and a variant knows
    other things: one token or several of a request, one prompt or many. The interpreter has no threads."""
    result = run(tool=VARIANTS, TRITON_CACHE_DIR=str(folder / "cache"))
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, Any]] = json.loads(result.stdout)
    assert len(found) == 4 and all(len(cases) > 1 for cases in found.values())
    sums = 0
    for kernel, cases in found.items():
        (first, expected), *others = cases.items()
        sums += len(expected[0])
        for case, decisive in others:
            assert decisive == expected, (kernel, first, case)
    assert sums > 10


def test_the_tool_runs_where_the_package_is_not_installed() -> None:
    """The tool runs without what `site` adds, as on a machine that is lent for ten minutes, where smoke compiles by
    it."""
    packages = os.pathsep.join(path for path in sys.path if Path(path).name.endswith("-packages"))
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-S", str(TOOL), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env={**variables, "PYTHONPATH": packages})
    assert result.returncode == 0, result.stderr
    assert "--share" in result.stdout


def test_the_tool_says_what_it_cannot_do() -> None:
    interpreted = run(TRITON_INTERPRET="1")
    assert interpreted.returncode == 2
    assert "unset it" in interpreted.stderr
