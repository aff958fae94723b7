"""The results of `bench/gpu/run.py`, in a file that is written after every one of them."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import Line, status


@dataclass
class Report:
    """All results, written to a file after every single one: a run that is killed leaves what it had.

    Attributes:
        sections: by name how each ended, what it skipped, and the cases that failed in it.
    """

    path: Path
    head: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[Line] = field(default_factory=list)

    def begin(self, section: str) -> dict[str, Any]:
        """The entry of a section that begins."""
        self.sections[section] = {"status": "begun", "skipped": [], "failed": []}
        self.write()
        return self.sections[section]

    def take(self, section: str, message: dict[str, Any]) -> None:
        """One message of the process of a section: a line, something measured that is not judged, or what it could not
        do."""
        for kind, value in message.items():
            if kind == "line":
                self.results.append(replace(Line(**value), part=section))
            elif kind == "head":
                self.head.update(value)
            elif kind == "at":
                self.sections[section]["at"] = value
            else:
                self.sections[section].setdefault(kind, []).append(value)
        self.write()

    def write(self) -> None:
        lines = [line.to_json() for line in self.results]
        everything = {**self.head, "sections": self.sections, "lines": lines, "status": self.status}
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(everything, indent=1, default=str), encoding="utf-8")
        partial.replace(self.path)

    @property
    def status(self) -> int:
        """As `common.status`; 1 too when something was not measured."""
        entries = self.sections.values()
        unmeasured = any(entry["status"] != "done" or entry["skipped"] or entry["failed"] for entry in entries)
        return status(self.results) or int(unmeasured)

    def summary(self) -> list[str]:
        """Every target, every check that failed, everything that was not measured, and the number of checks."""
        said = []
        for result in self.results:
            mark, part, name, value, goal, measured = result.row()
            if mark == "WRONG":
                said.append(f"{mark:7} {part}: {name}: {measured[-300:]}")
            elif goal and value:
                said.append(f"{mark:7} {value} {goal}  {part}: {name}")
        for name, entry in self.sections.items():
            if entry["status"] != "done":
                error = entry.get("error", "")[-200:].strip()
                said.append(f"{entry['status'].upper():7} {name} at {entry.get('at')}: {error}")
            said += [f"FAILED  {name}: {what[:300]}" for what in entry["failed"]]
            said += [f"SKIPPED {name}: {what[:100]}" for what in entry["skipped"]]
        return [*said, f"{sum(result.right is not None for result in self.results)} checks"]
