#!/usr/bin/env python
"""Everything that needs a GPU, in one run of ten minutes: kernels and engine, right first, then fast.

    python bench/gpu.py [--only attention,delta] [--budget 540] [--json gpu.json] [--tests]
    python bench/gpu.py --rehearse

Sizes are those of Qwen3.5-9B with random weights; no checkpoint and no network is needed. Each figure stands beside the
target it should reach and the peers that run here: torch's SDPA and flex_attention, flash-linear-attention,
causal-conv1d, flashinfer. The roofline is measured first, and counted bytes and operations are held against it.

The package is taken from the checkout when it is not installed, and wheels in `.whl/` are unpacked beside it. Figures
are written to a file after every one of them. What the budget of seconds does not hold is skipped, and named.

Exit status: 0; 1 when a target was missed or something was not measured; 2 when a result was wrong.

A rehearsal runs the same on a CPU with toy sizes, by whatever `HYBRID_KERNELS` asks for; its times mean nothing.
"""

import argparse
import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_bench import Bench, Report
from gpu_device import Cpu, Gpu, Roofline, machine
from gpu_sizes import FULL, TOY
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent


class Section(NamedTuple):
    """A part of the run.

    Attributes:
        place: module and function; imported when its turn comes, so that what fails there fails there alone.
        seconds: without so many left it does not begin.
    """

    place: tuple[str, str]
    seconds: float


SECTIONS = {
    "attention": Section(("gpu_attention", "decode"), 30),
    "extend": Section(("gpu_attention", "extend"), 20),
    "delta": Section(("gpu_delta", "step"), 20),
    "states": Section(("gpu_delta", "states"), 10),
    "hit": Section(("gpu_engine", "hit"), 45),
    "decode": Section(("gpu_engine", "decode"), 45),
    "sharing": Section(("gpu_engine", "sharing"), 60),
    "parity": Section(("gpu_engine", "parity"), 30),
    "store": Section(("gpu_rows", "elementwise"), 15),
    "linear": Section(("gpu_rows", "products"), 15),
    "experts": Section(("gpu_experts", "experts"), 15),
    "chunks": Section(("gpu_delta", "chunks"), 30),
    "convolution": Section(("gpu_delta", "convolution"), 15),
    "others": Section(("gpu_attention", "others"), 45),
    "tests": Section(("gpu_engine", "tests"), 30),
}
"""In the order in which they run: what the targets are about first, what compiles for long last."""


def prepare_imports(root: Path) -> None:
    """Make `hybrid` and what lies in `.whl/` importable.

    The checkout's root itself must not be on the path: transformers takes a top-level `kernels` for another package.
    """
    wheels = sorted((root / ".whl").glob("*.whl"))
    if wheels:
        unpacked = _temporary_folder()
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        sys.path.append(unpacked)  # behind what is installed
    if importlib.util.find_spec("hybrid") is None:
        folder = _temporary_folder()
        (Path(folder) / "hybrid").symlink_to(root / "hybrid", target_is_directory=True)
        sys.path.insert(0, folder)


def _temporary_folder() -> str:
    """A folder that goes when this process ends."""
    folder = tempfile.mkdtemp(prefix="hybrid-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run_section(name: str, section: Section, bench: Bench, report: Report, console: Console) -> None:
    """Run a section to its end or to its first exception, which is recorded."""
    entry: dict[str, Any] = {"status": "skipped", "skipped": []}
    report.sections[name] = entry
    if bench.left < section.seconds:
        entry["error"] = f"{section.seconds:.0f} s are needed to begin, {bench.left:.0f} s were left"
        report.write()
        return
    bench.skipped = entry["skipped"]
    start = time.perf_counter()
    try:
        function: Callable[[Bench], Iterator[Any]] = getattr(import_module(section.place[0]), section.place[1])
        for result in function(bench):
            report.add(name, result)
        entry["status"] = "done"
    except Exception:  # the other sections go on
        entry["status"], entry["error"] = "failed", traceback.format_exc()
        console.print(entry["error"], highlight=False, markup=False)
    entry["seconds"] = round(time.perf_counter() - start, 1)
    try:
        bench.device.release()
    except Exception:  # a device that is lost says so again at every call
        entry["error"] = f"{entry.get('error', '')}\n{traceback.format_exc()}"
        entry["status"] = "failed"
    report.write()
    console.print(f"{name}: {entry['status']} in {entry['seconds']} s, {bench.left:.0f} s left", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help=f"sections, with commas: {', '.join(SECTIONS)}")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: 540)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where figures go (default: $OUT/gpu.json, or gpu.json)"
    )
    parser.add_argument("--tests", action="store_true", help="run the tests that a GPU can run, too")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU: proves the script, not the speed")
    args = parser.parse_args(arguments)
    names = args.only.split(",") if args.only else [name for name in SECTIONS if name != "tests"]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    if args.tests and "tests" not in names:
        names.append("tests")
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --rehearse runs the script with toy sizes on a CPU")
    console = Console(width=None if sys.stdout.isatty() else 200)
    begin = time.perf_counter()
    prepare_imports(ROOT)
    device, sizes = (Cpu(), TOY) if args.rehearse else (Gpu(), FULL)
    path = args.json or Path(os.environ.get("OUT", ".")) / "gpu.json"
    with torch.no_grad():
        roofline = Roofline.measured(device, sizes.dtype, sizes.copied, sizes.matmul)
        device.release()
        told = {"copy GB/s": roofline.bandwidth / 1e9, "matmul TFLOP/s": roofline.matmul / 1e12}
        head = {"machine": machine(device, ROOT), "rehearsal": args.rehearse, "roofline": told}
        report = Report(path, head)
        report.write()
        console.print(head, highlight=False)
        bench = Bench(device, sizes, roofline, begin + args.budget, args.rehearse, ROOT)
        for name in (name for name in SECTIONS if name in names):
            run_section(name, SECTIONS[name], bench, report, console)
    report.head["seconds"] = round(time.perf_counter() - begin, 1)
    report.head["state after"] = device.state()
    report.write()
    report.show(console)
    console.print(f"{report.head['seconds']} s; figures in {path}; status {report.status}", highlight=False)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
