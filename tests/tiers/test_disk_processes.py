"""Copies on disk and processes: killed at any moment, two at once, of other users, and without space."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def trial(folder: Path, name: str, *given: int) -> dict[str, int]:
    """Run a trial of `support/disk_trials.py`, in processes without torch."""
    program = ROOT / "tests" / "support" / "disk_trials.py"
    result = subprocess.run(
        [sys.executable, program, name, folder / "cache", *map(str, given)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    counts: dict[str, int] = json.loads(result.stdout)
    return counts


def test_a_process_that_is_killed_at_any_of_200_moments_leaves_only_what_is_right(tmp_path: Path) -> None:
    counts = trial(tmp_path, "kill", 200)
    assert counts["killed"] == 200
    assert counts["lives that found copies"] > 100
    assert counts["reports of files of processes that ended"] > 5, "some were killed between payload and manifest"


def test_two_processes_read_and_write_one_directory(tmp_path: Path) -> None:
    counts = trial(tmp_path, "share", 30)
    assert counts == {"found by 0 of the other": 30, "found by 1 of the other": 30, "found later": 60}


@pytest.fixture
def shared_folder() -> Path:
    """A folder that other users can reach."""
    folder = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip()
    return Path(folder)


def test_a_directory_that_cannot_be_written_or_belongs_to_another_user(shared_folder: Path) -> None:
    assert trial(shared_folder, "user")["users"] >= 1


def test_a_kernel_that_refuses_writes_costs_copies_and_nothing_else(tmp_path: Path) -> None:
    assert trial(tmp_path, "full")["copies found"] > 0
