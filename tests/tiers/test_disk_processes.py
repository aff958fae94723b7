"""Copies on disk and processes: killed at any moment, two at once, of other users, and without space."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def trial(folder: Path, name: str, *given: int, before: Sequence[str] = ()) -> dict[str, int]:
    """Run a trial of `support/disk_trials.py`, in processes without torch.

    Args:
        before: the command that runs it.
    """
    program = ROOT / "tests" / "support" / "disk_trials.py"
    result = subprocess.run(
        [*before, sys.executable, program, name, folder / "cache", *map(str, given)],
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


def test_a_process_that_is_killed_within_a_segment_leaves_only_what_is_right(tmp_path: Path) -> None:
    counts = trial(tmp_path, "tear", 50)
    moments = {name: count for name, count in counts.items() if name.startswith("killed: ")}
    assert moments == {"killed: bytes": 20, "killed: fsync": 10, "killed: replace": 10, "killed: rows": 10}
    assert counts["files that were not whole"] >= 40
    assert counts["lives that found copies"] == 50, "the segment before is there"


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


def test_a_disk_that_is_full_costs_copies_and_is_used_again_when_it_is_not(tmp_path: Path) -> None:
    own = ["unshare", "--map-root-user", "--mount"]  # what is mounted is seen by this process alone
    mounts = [*own, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mounts, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    counts = trial(tmp_path / "small", "space", before=own)
    assert counts["failures"] and counts["found"] < counts["found with more room"] == counts["found by the next life"]
