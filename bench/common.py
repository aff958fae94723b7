"""What all benchmarks share: a figure, the machine that it was measured on, and how figures are printed and judged."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("numpy", "torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d")

Medians = dict[str, float | None]
"""Measurements by name; None: it was not measured."""


@dataclass(frozen=True)
class Line:
    """One figure, or one thing that must be right.

    Attributes:
        value: what is judged, a ratio if nothing else is said; None: nothing to compare with ran here.
        target: the smallest value to accept, or the largest where `at_most`; None: nothing is asked.
        part: the mode or the section that it belongs to.
        medians: the measurements behind it.
        unit: of the medians.
        details: counts, rates and settings behind it.
        right, found: whether a thing is as it must be, and how it was found; None: the line is a figure.
    """

    name: str
    value: float | None = None
    target: float | None = None
    at_most: bool = False
    part: str = ""
    medians: Medians = field(default_factory=dict)
    unit: str = "s"
    details: dict[str, Any] = field(default_factory=dict)
    right: bool | None = None
    found: str = ""

    @property
    def reached(self) -> bool:
        """Whether the target is reached; a target with nothing to compare with is not."""
        if self.target is None or self.value is None:
            return self.target is None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def mark(self) -> str:
        if self.right is not None:
            return "ok" if self.right else "WRONG"
        return "" if self.target is None else "ok" if self.reached else "MISS"

    @property
    def goal(self) -> str:
        """The target in words."""
        return "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:g}"

    def row(self) -> tuple[str, ...]:
        medians = (f"{name} {quantity(x, self.unit)}" for name, x in self.medians.items() if x is not None)
        value = "" if self.value is None else number(self.value)
        return self.mark, self.part, self.name, value, self.goal, self.found or ", ".join(medians)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


def check(name: str, right: bool, found: str) -> Line:
    """The line of something that must be right."""
    return Line(name, right=right, found=found)


def ratio(name: str, medians: Medians, over: str, under: str, target: float | None = None, **how: Any) -> Line:
    """The line of one measurement over another. `how`: further attributes of the line."""
    above, below = medians[over], medians[under]
    value = None if above is None or below is None else above / below
    return Line(name, value, target, medians=medians, **how)


COLUMNS = ("", "part", "figure", "value", "target", "measured")
"""Of a table of results."""


def number(value: float) -> str:
    """Three digits that matter, no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """A measurement with its unit; seconds as milliseconds."""
    return f"{number(1000 * value)} ms" if unit == "s" else f"{number(value)} {unit}"


def status(lines: Sequence[Line]) -> int:
    """The exit status: 2 when a result is wrong, 1 when a target is missed, else 0."""
    if any(line.right is False for line in lines):
        return 2
    return 1 if any(not line.reached for line in lines) else 0


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[object] = ()) -> None:
    """Print a table, and notes below it, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table, markup=False)
    for note in notes:
        console.print(str(note), highlight=False, markup=False, soft_wrap=True)


def finish(lines: Sequence[Line], args: Namespace, **more: Any) -> int:
    """Print all figures, the machine, and what else belongs to the result, as a table or with `--json` as a JSON
    object. Returns the exit status."""
    if args.json:
        print(json.dumps({"machine": machine(), **more, "lines": [line.to_json() for line in lines]}))
    else:
        print_table(COLUMNS, (line.row() for line in lines), [{**more, **machine()}])
    return status(lines)


def printed(command: Sequence[object], **how: Any) -> Any:
    """The JSON object that a program prints. `how`: of `subprocess.run`, which raises where the program fails."""
    output = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, **how).stdout
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def arguments(description: str | None, runs: int | None = None, threads: bool = False) -> ArgumentParser:
    """A parser with the options that programs share: `--runs` where it has a default, `--threads` if asked for."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, help=f"measured runs per side (default: {runs})")
    if threads:
        parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(runs: int, **sides: Callable[[], float]) -> Medians:
    """Median seconds of each side, the sides taking turns; the first turn warms up and is not counted."""
    from tqdm import tqdm

    turns = tqdm(range(runs + 1), desc=", ".join(sides), unit="run", disable=None, leave=False)
    times = [{name: side() for name, side in sides.items()} for _ in turns][1:]
    return {name: statistics.median(turn[name] for turn in times) for name in sides}


def machine(**more: Any) -> dict[str, Any]:
    """What figures are measured on: processor, versions of packages, commit, date."""
    found = re.search(r"model name\s*: (.*)", CPUINFO.read_text(encoding="utf-8")) if CPUINFO.is_file() else None
    packages = {package.name: package.version for package in distributions() if package.name in PACKAGES}
    torch = sys.modules.get("torch")
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        commit = ""
    return {
        "cpu": found[1] if found else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        **({} if torch is None else {"threads": torch.get_num_threads()}),
        "python": platform.python_version(),
        "packages": packages,
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **more,
    }
