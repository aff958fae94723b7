"""Compiled code is kept on disk, and a process that finds it there runs it without what compiles."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

machine_code = pytest.importorskip("hybrid.kernels.cpu.machine_code")

from hybrid.kernels.cpu import kept, target  # noqa: E402
from hybrid.kernels.cpu.functions import COMPILED, Function, functions  # noqa: E402
from hybrid.kernels.cpu.kinds import HALF, INTEGER  # noqa: E402
from hybrid.kernels.cpu.processes import compile_all  # noqa: E402

TAKE, COMPUTE, ATTEND = (
    Function(f"{COMPILED}.{module}", name, kinds)
    for module, name, kinds in (
        ("memory", "take", (INTEGER, HALF, INTEGER, INTEGER)),
        ("team", "compute", (INTEGER,) * 4),
        ("attention", "attend", (INTEGER, HALF, INTEGER, INTEGER)),
    )
)

PROGRAM = """
import json, sys, torch
from hybrid.kernels.cpu import elementwise
x = torch.linspace(-3, 5, 60).view(3, 20)
norms = elementwise.rms_norm(x, torch.ones(20), 1e-6).tolist()
prepared = "numba" in sys.modules
gated = elementwise.gated_rms_norm(x, x + 1, torch.ones(20), 1e-6).tolist() if "gated" in sys.argv else None
print(json.dumps([prepared, norms, gated]))
"""

GENERATE = """
import json, sys
from hybrid import CacheConfig, Engine, SamplingParams
engine = Engine.from_pretrained("tiny", cache=CacheConfig(memory="64MiB"))
texts = engine.generate(["The with statement " * 20], SamplingParams(max_new_tokens=4), progress=False)
print(json.dumps([[name for name in ("numba", "llvmlite") if name in sys.modules], texts[0].text]))
"""

WITHOUT_NUMBA = """
import json, sys
sys.modules["numba"] = None
import torch
from hybrid.kernels import ops
from hybrid.kernels.reference import elementwise as twins
x = torch.linspace(-3, 5, 60).view(3, 20)
is_twin = torch.equal(ops.rms_norm(x, torch.ones(20), 1e-6), twins.rms_norm(x, torch.ones(20), 1e-6))
print(json.dumps([ops.compiled_module("elementwise"), is_twin]))
"""


def run(folder: Path, program: str = PROGRAM, *more: str) -> Any:
    """What a new process prints that keeps code in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "HYBRID_KERNELS": "auto"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *more],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return json.loads(found.stdout)


def test_without_a_place_to_keep_it_code_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(kept, "SOURCES", Path("/nowhere"))
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert kept.folder.__wrapped__() is None
    monkeypatch.undo()
    (tmp_path / "file").touch()
    for place in (None, tmp_path / "file" / "folder"):
        monkeypatch.setattr(kept, "folder", lambda place=place: place)
        assert machine_code.Compiled(__name__, "nothing")(1) is False


def nothing(value: int) -> None:
    """A function that is compiled."""


def test_code_on_disk_is_loaded_alone_and_what_is_not_there_is_compiled(tmp_path: Path) -> None:
    compiled, expected, _ = run(tmp_path)
    assert compiled
    (norm,) = tmp_path.rglob("*.rms_norm.*.code")
    prepared, norms, gated = run(tmp_path, PROGRAM, "gated")
    assert not prepared
    assert norms == expected
    (other,) = tmp_path.rglob("*.gated_rms_norm.*.code")
    norm.write_bytes(norm.read_bytes()[:100])
    changed = bytearray(other.read_bytes())
    changed[-100] ^= 1
    other.write_bytes(changed)
    again, norms, from_disk = run(tmp_path, PROGRAM, "gated")
    assert again
    assert (norms, from_disk) == (expected, gated)


def test_two_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as both:
        first, second = both.map(run, [tmp_path] * 2)
    assert first == second
    assert run(tmp_path) == [False, *first[1:]]


def test_processes_without_torch_compile_the_same_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    unknown = Function(f"{COMPILED}.memory", "nothing", (INTEGER,))
    found, again = (dict(compile_all([TAKE, unknown, COMPUTE], target.target())) for _ in range(2))
    assert found == again
    assert found.keys() == {TAKE, COMPUTE}


def test_where_no_process_runs_nothing_is_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/nowhere", shutil.which("false") or "/nowhere"):
        monkeypatch.setattr(sys, "executable", program)
        assert [*compile_all([TAKE, COMPUTE], target.target())] == []


def test_processes_that_compile_end_with_who_waits_for_them() -> None:
    before = {*psutil.Process().children()}
    codes = compile_all([ATTEND, COMPUTE], target.target())
    monitored = []
    if (os.cpu_count() or 1) > 1:
        assert next(codes)[0] == COMPUTE
        monitored = [*{*psutil.Process().children()} - before]
        assert monitored
    codes.close()
    assert psutil.wait_procs(monitored, timeout=5)[1] == []


def test_code_compiled_in_advance_is_used_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "folder", lambda: None)
    assert [*machine_code.compile_in_advance([TAKE])] == [TAKE]
    assert TAKE not in machine_code.missing(functions(HALF, False))
    monkeypatch.setitem(sys.modules, f"{COMPILED}.build", None)  # it cannot be imported
    assert machine_code.Compiled(*TAKE[:2]).address(*TAKE.arguments)


def test_what_two_compile_in_advance_at_once_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_one = machine_code.compile_all
    asked: list[Function] = []

    def counted(wanted: list[Function], *more: Any) -> Any:
        asked.extend(wanted)
        return compile_one(wanted, *more)

    monkeypatch.setattr(kept, "folder", lambda: tmp_path / "code")
    monkeypatch.setattr(machine_code, "compile_all", counted)
    with ThreadPoolExecutor() as both:
        found = both.map(lambda _: [*machine_code.compile_in_advance([COMPUTE])], range(2))
        assert [*found] == [[COMPUTE]] * 2
    assert asked == [COMPUTE]
    with kept.alone():
        monkeypatch.setattr(kept, "MAX_WAIT", 0.1)
        assert [*machine_code.compile_in_advance([COMPUTE])] == [COMPUTE]


def test_what_compiles_is_not_imported_where_all_code_is_on_disk() -> None:
    """The code is where tests keep it, and is compiled by the first process if they have not run before."""
    folder = kept.folder()
    assert folder is not None
    _, expected = run(folder, GENERATE)
    assert run(folder, GENERATE) == [[], expected]


def test_where_numba_does_not_run_the_twins_compute(tmp_path: Path) -> None:
    reason, is_twin = run(tmp_path, WITHOUT_NUMBA)
    assert "numba" in reason
    assert is_twin


def test_the_cpu_is_asked_for_once_and_again_where_the_system_describes_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(kept, "folder", lambda: tmp_path / "kept")
    expected, files = target.compiler(), []
    for described in ("model name: A\ncpu MHz: 1\n\n", "model name: A\ncpu MHz: 2\n\n", "model name: B\n\n"):
        target.CPUINFO.write_text(described, encoding="utf-8")
        assert target.compiler.__wrapped__() == expected
        files.append(len([*kept.folder().iterdir()]))
    assert files == [1, 1, 2]
    target.CPUINFO.unlink()
    assert target.compiler.__wrapped__() == expected
    assert len([*kept.folder().iterdir()]) == 2
