"""Compiled operations are kept in Numba's cache, whatever happens to it, and to processes that use it at once."""

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from numba.core import config
from numba.core.caching import FunctionCache

from hybrid.kernels.cpu import machine_code
from hybrid.kernels.cpu.compiled import build
from hybrid.kernels.cpu.functions import COMPILED, Function, all_functions
from hybrid.kernels.cpu.kinds import FLOAT, HALF, INTEGER

TAKE, SHIFT, COMPUTE = (
    Function(f"{COMPILED}.{module}", name, kinds)
    for module, name, kinds in (
        ("memory", "take", (INTEGER, HALF, INTEGER, INTEGER)),
        ("memory", "shift", (INTEGER, FLOAT, INTEGER, INTEGER)),
        ("team", "compute", (INTEGER,) * 4),
    )
)

PROGRAM = """
import json, logging, sys
import torch
from hybrid.kernels.cpu import elementwise, machine_code
from hybrid.kernels.cpu.compiled import build
compiled = []
plain = build.Build.compiled
build.Build.compiled = lambda self, signature: (compiled.append(str(signature)), plain(self, signature))[1]
x = torch.linspace(-3, 5, 60).view(3, 20)
print(json.dumps([len(compiled), elementwise.rms_norm(x, torch.ones(20), 1e-6).tolist(), len(compiled)]))
"""


def run(folder: Path, program: str = PROGRAM, **more: str) -> Any:
    """Return what a new process prints whose cache is in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "HYBRID_KERNELS": "auto", **more}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A cache that one process has filled, and what it computed."""
    folder = tmp_path_factory.mktemp("cache")
    before, norms, compiled = run(folder)
    assert (before, compiled) == (0, 2)  # the norm, and what runs it
    return folder, norms


@pytest.fixture
def expected(filled: tuple[Path, Any]) -> Any:
    """What every process computes."""
    return filled[1]


@pytest.fixture
def kept(filled: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the cache that one process has filled."""
    return shutil.copytree(filled[0], tmp_path / "kept")


@pytest.mark.parametrize("ending", ["*.nbi", "*.nbc"])
def test_torn_files_are_compiled_again(ending: str, kept: Path, expected: Any) -> None:
    for path in kept.rglob(ending):
        path.write_bytes(path.read_bytes()[:50])
    assert run(kept) == [0, expected, 2]


def test_two_processes_that_start_at_once_do_not_disturb_each_other(tmp_path: Path, expected: Any) -> None:
    with ThreadPoolExecutor() as both:
        assert [found[1] for found in both.map(run, [tmp_path] * 2)] == [expected] * 2
    assert run(tmp_path) == [0, expected, 0]


def test_code_of_another_cpu_stays_beside_it(kept: Path, expected: Any) -> None:
    assert run(kept, NUMBA_CPU_NAME="generic") == [0, expected, 2]
    assert run(kept, NUMBA_CPU_NAME="generic") == [0, expected, 0]
    assert run(kept) == [0, expected, 0]


def test_code_of_other_sources_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = tuple(map(build.type_of, TAKE.arguments))
    found = build.Build(*TAKE[:2])
    found.compiled(signature)
    assert found.kept(signature) is not None
    monkeypatch.setattr(build, "sources", lambda: "others")
    assert found.kept(signature) is None


def no_folder(function: object) -> None:
    raise RuntimeError("cannot cache function: no locator available")


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("failure", ["no folder", "a full disk", "no home"])
def test_what_cannot_be_kept_is_compiled(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if failure == "no folder":
        monkeypatch.setattr(build, "FunctionsCache", no_folder)
    elif failure == "a full disk":
        monkeypatch.setattr(FunctionCache, "save_overload", full_disk)
    else:
        monkeypatch.setattr(pwd, "getpwuid", full_disk)
        for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
    found = build.Build(*TAKE[:2])
    assert found.compiled(tuple(map(build.type_of, TAKE.arguments))).library is not None


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has loaded nothing, with a cache of its own."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    config.reload_config()
    monkeypatch.setattr(machine_code, "loaded", {})
    build.build_of.cache_clear()
    yield tmp_path
    build.build_of.cache_clear()
    monkeypatch.undo()
    config.reload_config()


def test_processes_compile_in_advance_what_is_then_only_loaded(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "cores", lambda: 2)
    wanted = [TAKE, SHIFT, COMPUTE]
    assert machine_code.missing(wanted) == wanted
    assert sorted(machine_code.compile_in_advance(wanted)) == sorted(wanted)
    assert machine_code.missing(wanted) == []
    monkeypatch.setattr(build.Build, "compiled", full_disk)
    assert machine_code.Compiled(*TAKE[:2]).address(*TAKE.arguments)


def test_processes_that_compile_end_with_who_waits_for_them(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "cores", lambda: 2)
    before = {*psutil.Process().children()}
    compiled = machine_code.compile_in_advance([TAKE, SHIFT, *all_functions()[:4]])
    next(compiled)
    started = [*{*psutil.Process().children()} - before]
    assert len(started) == 2
    compiled.close()
    assert psutil.wait_procs(started, timeout=5)[1] == []


def test_where_no_process_runs_what_is_needed_is_compiled_here(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "cores", lambda: 2)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert [*machine_code.compile_in_advance([TAKE, SHIFT])] == []
    assert machine_code.Compiled(*TAKE[:2]).address(*TAKE.arguments)
