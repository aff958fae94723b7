"""Code that comes with the package: it is used without Numba, on CPUs of its level and with its sources alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hybrid.kernels.cpu.machine_code")

from hybrid.kernels.cpu import kept, shipped, target
from hybrid.kernels.cpu.compiled.build import compiled
from hybrid.kernels.cpu.functions import COMPILED, Function, all_functions, functions
from hybrid.kernels.cpu.kinds import FLOAT, HALF, INTEGER

OTHER_CPU = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}

PROGRAM = """
import json, sys
from pathlib import Path
sys.modules["numba"] = sys.modules["llvmlite"] = None  # importing them fails
from hybrid.kernels.cpu import kept, shipped
shipped.FOLDER, kept.folder = Path(sys.argv[1]), lambda: None
import torch
from hybrid.kernels import ops
from hybrid.kernels.cpu.machine_code import missing
from hybrid.kernels.cpu.functions import all_functions
x = torch.linspace(-3, 5, 60).view(3, 20)
gated = ops.silu_and_mul(x, x + 1)
print(json.dumps([str(ops.compiled_module("elementwise")), missing(all_functions()), gated.tolist()]))
"""

FOUND = [
    Function(f"{COMPILED}.elementwise", "silu_and_mul", (INTEGER, FLOAT, INTEGER, INTEGER)),
    Function(f"{COMPILED}.team", "compute", (INTEGER,) * 4),
]


def own_level() -> str:
    level = target.level_of_this_cpu()
    if level is None:
        pytest.skip("code is shipped for levels of CPUs on Linux and x86-64")
    return level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of code for the CPU at hand, of two functions."""
    place = tmp_path_factory.mktemp("levels")
    shipped.write(own_level(), {each.symbol: compiled(each) for each in FOUND}, place)
    return place


def run(folder: Path, **environment: str) -> Any:
    """What a process without Numba and without a place to keep code prints; None: it finds nothing to run."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "HYBRID_KERNELS": "auto"},
        check=False,
    )
    return json.loads(ended.stdout) if ended.returncode == 0 else None


def test_a_process_without_numba_runs_what_is_shipped(folder: Path) -> None:
    import torch

    from hybrid.kernels import ops

    x = torch.linspace(-3, 5, 60).view(3, 20)
    module, missing, gated = run(folder)
    assert module.startswith("<module")
    assert missing == []
    assert gated == ops.silu_and_mul(x, x + 1).tolist()
    assert run(folder, **OTHER_CPU) is None


def test_code_is_used_whole_and_with_its_sources_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find, name = shipped.code.__wrapped__, shipped.file_of(own_level())
    monkeypatch.setattr(shipped, "FOLDER", folder)
    assert find() == {each.symbol: compiled(each) for each in FOUND}
    with monkeypatch.context() as changed:
        changed.setattr(kept, "sources", lambda: b"other sources")
        assert find() == {}
    with monkeypatch.context() as changed:
        changed.setenv("NUMBA_CPU_NAME", "haswell")
        assert find() == {}
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert find() == {}
    for torn in (b"", (folder / name).read_bytes()[:-1]):
        (tmp_path / name).write_bytes(torn)
        assert find() == {}


def test_a_cpu_is_of_the_best_level_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own_level()
    monkeypatch.setattr(target, "CPUINFO", tmp_path / "cpuinfo")
    wide, best = "avx512f avx512bw avx512cd avx512dq avx512vl", "avx512_bf16"
    third = " ".join(target.V3)
    for flags, level in (
        (f"{third} {wide} {best}", "v4-bf16"),
        (f"{third} {wide}", "v4"),
        (f"{third} {best}", "v3"),
        (third, "v3"),
        (third.replace("fma", "fma4"), None),
    ):
        target.CPUINFO.write_text(f"model name\t: any\nflags\t\t: fpu {flags}\n\n", encoding="utf-8")
        assert target.level_of_this_cpu() == level
    target.CPUINFO.unlink()
    assert target.level_of_this_cpu() is None


def test_an_imitated_cpu_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = target.target()
    for name, value in OTHER_CPU.items():
        monkeypatch.setenv(name, value)
    assert target.level_of_this_cpu() is None
    other = target.Target(*OTHER_CPU.values())
    assert other.short != here.short


def test_every_function_that_a_model_needs_is_shipped() -> None:
    """What is asked for is in the list: it is checked where code is loaded."""
    everything = all_functions()
    assert len({each.symbol for each in everything}) == len(everything)
    needed = {
        each for numbers in (FLOAT, HALF) for quantized in (False, True) for each in functions(numbers, quantized)
    }
    assert needed == {*everything}
