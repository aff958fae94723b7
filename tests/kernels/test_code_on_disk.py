"""Compiled code is kept on disk, and a process that finds it there runs it without preparing to compile."""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

machine_code = pytest.importorskip("hybrid.kernels.cpu.machine_code")

PROGRAM = """
import json, sys, torch
from hybrid.kernels.cpu import elementwise
x = torch.linspace(-3, 5, 60).view(3, 20)
norms = elementwise.rms_norm(x, torch.ones(20), 1e-6).tolist()
prepared = "numba.np.arraymath" in sys.modules
gated = elementwise.gated_rms_norm(x, x + 1, torch.ones(20), 1e-6).tolist() if "gated" in sys.argv else None
print(json.dumps([prepared, norms, gated]))
"""


def run(folder: Path, *more: str) -> Any:
    """Whether a new process prepared to compile for a norm; the norm, and that of another function."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *more], capture_output=True, text=True, env=environment, check=True
    )
    return json.loads(found.stdout)


def test_without_a_place_to_keep_it_code_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(machine_code.numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(machine_code, "SOURCES", Path("/nowhere"))
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert machine_code.folder() is None
    monkeypatch.undo()
    monkeypatch.setattr(machine_code, "folder", lambda: None)
    assert machine_code.Compiled(nothing)(1) is False


def nothing(value: int) -> None:
    """A function that is compiled."""


def test_code_on_disk_is_loaded_alone_and_what_is_not_there_is_compiled(tmp_path: Path) -> None:
    compiled, expected, _ = run(tmp_path)
    assert compiled
    (norm,) = tmp_path.rglob("*-_rms_norm-*.o")
    prepared, norms, gated = run(tmp_path, "gated")
    assert not prepared
    assert norms == expected
    (other,) = tmp_path.rglob("*-_gated_rms_norm-*.o")
    norm.write_bytes(norm.read_bytes()[:100])
    changed = bytearray(other.read_bytes())
    changed[-100] ^= 1
    other.write_bytes(changed)
    again, norms, from_disk = run(tmp_path, "gated")
    assert again
    assert (norms, from_disk) == (expected, gated)
