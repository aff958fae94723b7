"""What `hybrid fleet` makes of its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hybrid import ArgumentError
from hybrid.commands import fleet
from hybrid.commands.engine import adapters_of


def test_adapters_are_named_once_each_with_their_folders(tmp_path: Path) -> None:
    given = argparse.Namespace(adapter=[f"law={tmp_path}/a", f"code={tmp_path}/b=c"])
    assert adapters_of(given, "tiny") == {"law": f"{tmp_path}/a", "code": f"{tmp_path}/b=c"}
    for wrong in (["law"], ["=folder"], ["law="], ["law=a", "law=b"], ["tiny=a"]):
        with pytest.raises(ArgumentError, match="NAME=FOLDER"):
            adapters_of(argparse.Namespace(adapter=wrong), "tiny")


def test_memory_that_replicas_share_needs_a_file_system_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "MEMORY", tmp_path)
    made = Path(fleet.shared_directory())
    assert made.parent == tmp_path and made.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(fleet, "MEMORY", tmp_path / "none")
    with pytest.raises(ArgumentError, match="use --disk"):
        fleet.shared_directory()
