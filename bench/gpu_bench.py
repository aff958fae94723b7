"""What the sections of `bench/gpu.py` share: inputs, clocks, the figures and checks that they give, and how these are
kept."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_device import Call, Device, Roofline, Timing
from gpu_sizes import Sizes
from rich.console import Console
from rich.table import Table
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Largest norm of the error over norm of the truth, by the type of inputs and output.

float32: sums of thousands of terms in another order, and exponentials to a few units in the last place.
float16: 11 bits; a rounded result is wrong by 1.4e-4 of itself in the mean square, and so are the probabilities of an
attention or the pieces of a chunk, which are rounded on the way.
bfloat16: 8 bits; the same, each 1.1e-3.
Something wrong in one tile, head or page shows as 1e-2 and more."""

STATE_TOLERANCE = 1e-3
"""The same for states, which are fp32: what may differ is whether a few q, k, v fall on the other side when rounded."""


@dataclass(frozen=True)
class Line:
    """One figure.

    Attributes:
        ratio: what is judged; None: nothing to compare with ran here.
        target: the least of it, or the most where `at_most`; None: nothing is asked.
        seconds: the medians behind it.
        figures: counts and rates behind it, and which peers did not run.
    """

    name: str
    ratio: float | None
    target: float | None = None
    at_most: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        if self.target is None or self.ratio is None:
            return self.target is None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


@dataclass(frozen=True)
class Check:
    """One thing that must be right."""

    name: str
    passed: bool
    detail: str


OTHER_RESULT = 0.1
"""A peer whose result is further from ours computes something else: its time is told, and not compared with."""

Result = Line | Check

Peers = dict[str, Callable[[], Sequence[Call]]]
"""For each peer by name, what makes its calls."""


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over norm of the truth; NaN where anything is."""
    difference, truth = found.double() - truth.double(), truth.double()
    return float(difference.norm() / truth.norm().clamp(min=1e-30))


def compare(name: str, found: Tensor, truth: Tensor, tolerance: float | None = None) -> Check:
    """Whether a result is near enough to the truth; NaN is not."""
    allowed = TOLERANCE[found.dtype] if tolerance is None else tolerance
    error = relative_error(found, truth)
    return Check(name, error <= allowed, f"error {error:.1e}, allowed {allowed:.0e}")


@dataclass
class Report:
    """All that was found, written to a file after every single result: a run that is killed leaves what it had."""

    path: Path
    head: dict[str, Any]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[tuple[str, Result]] = field(default_factory=list)

    def add(self, section: str, result: Result) -> None:
        self.results.append((section, result))
        self.write()

    def write(self) -> None:
        lines, checks = [], []
        for section, result in self.results:
            told = {"section": section, **asdict(result)}
            if isinstance(result, Line):
                lines.append({**told, "reached": result.reached})
            else:
                checks.append(told)
        everything = {**self.head, "sections": self.sections, "lines": lines, "checks": checks, "status": self.status}
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(everything, indent=1, default=str), encoding="utf-8")
        beside.replace(self.path)

    @property
    def status(self) -> int:
        """0: all is well; 1: a target was missed or not measured; 2: a check failed."""
        if any(isinstance(result, Check) and not result.passed for _, result in self.results):
            return 2
        missed = any(isinstance(result, Line) and not result.reached for _, result in self.results)
        unmeasured = any(section["status"] != "done" or section["skipped"] for section in self.sections.values())
        return 1 if missed or unmeasured else 0

    def show(self, console: Console) -> None:
        table = Table("", "section", "figure", "ratio", "target", "medians")
        for section, result in self.results:
            if isinstance(result, Check):
                table.add_row("ok" if result.passed else "WRONG", section, result.name, "", "", result.detail)
                continue
            target = "" if result.target is None else f"{'<=' if result.at_most else '>='} {result.target}"
            medians = ", ".join(f"{name} {_milliseconds(spent)}" for name, spent in result.seconds.items())
            mark = "" if result.target is None else "ok" if result.reached else "MISS"
            ratio = "" if result.ratio is None else f"{result.ratio:.3g}"
            table.add_row(mark, section, result.name, ratio, target, medians)
        for name, entry in self.sections.items():
            if entry["status"] != "done":
                reason = entry.get("error", "").strip().splitlines()[-1:] or [""]
                table.add_row(entry["status"].upper(), name, reason[0][:200], "", "", "")
            for what in entry["skipped"]:
                table.add_row("SKIPPED", name, what, "", "", "no time left, or no peer here")
        console.print(table)
        for text in self.summary():
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    def summary(self) -> list[str]:
        """What was asked, a short line each; of the checks those that failed, and how many there were."""
        told, checks = [], 0
        for section, result in self.results:
            if isinstance(result, Check):
                checks += 1
                if not result.passed:
                    told.append(f"WRONG   {section}: {result.name}: {result.detail[-300:]}")
            elif result.target is not None and result.ratio is not None:
                mark, sign = "ok" if result.reached else "MISS", "<=" if result.at_most else ">="
                told.append(f"{mark:7} {result.ratio:.3f} {sign} {result.target}  {section}: {result.name}")
        for name, entry in self.sections.items():
            if entry["status"] != "done":
                told.append(f"{entry['status'].upper():7} {name}: {entry.get('error', '').strip()[-200:]}")
            told += [f"SKIPPED {name}: {what[:100]}" for what in entry["skipped"]]
        return [*told, f"{checks} checks"]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds >= 0.01 else f"{1000 * seconds:.4f} ms"


@dataclass
class Bench:
    """What a section works with.

    Attributes:
        deadline: on `time.perf_counter`; what would end after it is skipped.
        skipped: what the section at work has skipped.
        kept: things that several sections need, made once.
    """

    device: Device
    sizes: Sizes
    roofline: Roofline
    deadline: float
    rehearsal: bool
    root: Path
    skipped: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device.device).manual_seed(0)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; says that `what` is skipped if not."""
        if self.left >= seconds:
            return True
        self.skipped.append(what)
        return False

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What several sections need, made when it is first asked for."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    # Inputs

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Fresh random numbers: zeros would hide what is not written, and run faster."""
        made = torch.empty(shape, device=self.device.device, dtype=dtype or self.sizes.dtype)
        return made.normal_(generator=self._generator)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device.device)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device.device)

    def sets(self, num_bytes: float) -> int:
        """How many sets of so many bytes it takes so that none is found in the L2 when it comes round again."""
        if self.rehearsal:
            return 2
        return max(1, min(64, math.ceil(3 * self.device.cache_bytes / num_bytes)))

    # Measuring

    def of_bandwidth(self, name: str, num_bytes: float, timing: Timing, target: float | None) -> Line:
        """A line: which part of the copy bandwidth a kernel reaches with the bytes that it must move."""
        rate = num_bytes / timing.seconds
        figures = {"bytes": num_bytes, "GB/s": rate / 1e9, "timing": asdict(timing)}
        seconds = {"ours": timing.seconds, "floor": num_bytes / self.roofline.bandwidth}
        return Line(
            f"{name}, of copy bandwidth", rate / self.roofline.bandwidth, self.asked(target), False, seconds, figures
        )

    def against_fastest(
        self, name: str, ours: Timing, peers: Peers, target: float | None, error: Callable[[Any], float] | None = None
    ) -> Line:
        """A line: our time over that of the fastest peer that runs here. Beside it lie the times of all of them, why
        some did not run, and how far their results are from ours.

        Args:
            peers: for each, what makes its calls.
            error: of what a peer's call gives.
        """
        timings: dict[str, Timing] = {}
        told: dict[str, Any] = {"ours": asdict(ours)}
        for peer, make in peers.items():
            try:
                calls = make()
                timing = self.device.time(calls)
                told[peer] = asdict(timing)
                if error is not None:
                    told[peer]["error"] = error(calls[0]())
                if told[peer].get("error", 0.0) <= OTHER_RESULT:
                    timings[peer] = timing
            except Exception as failure:  # a peer may fail in any way; that is no fault of ours
                told[peer] = f"{type(failure).__name__}: {failure}"[:300]
                self.device.release()
        seconds = {"ours": ours.seconds, **{peer: timing.seconds for peer, timing in timings.items()}}
        if not timings:
            if self.asked(target) is not None:
                self.skipped.append(f"{name} against {', '.join(peers)}")
            return Line(f"{name}: no peer runs here", None, None, True, seconds, told)
        fastest = min(timings, key=lambda peer: timings[peer].seconds)
        ratio = ours.seconds / timings[fastest].seconds
        return Line(f"{name}, over {fastest}", ratio, self.asked(target), True, seconds, told)

    def asked(self, target: float | None) -> float | None:
        """The target; none in a rehearsal, whose times mean nothing."""
        return None if self.rehearsal else target
