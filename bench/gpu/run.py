#!/usr/bin/env python
"""Everything that needs a GPU, in one run of ten minutes: kernels and engine, first right, then fast.

    python bench/gpu/run.py [--only attention delta] [--budget 540] [--json gpu.json]
    python bench/gpu/run.py --rehearse

Sizes are those of Qwen3.5-9B with random weights; no checkpoint and no network is needed. Each figure is printed with
the target that it should reach and the peers that run here: torch's SDPA, flash-linear-attention.
The roofline is measured first, and counted bytes and operations are compared with it.

Figures are written to a file after every one of them. What the budget of seconds does not hold is skipped and reported.
Exit status: 0; 1 when a target was missed or something was not measured; 2 when a result was wrong. A rehearsal runs
the same on a CPU with toy sizes, by the kernels that `HYBRID_KERNELS` names; its times mean nothing.
"""

import os
import sys
import time
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: what is found as `kernels` is taken for another package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from common import COLUMNS, Line, machine, print_table
from gpu import attention, engine, kernels
from gpu.harness import Bench, Cpu, Gpu, Planned, Report, Roofline
from gpu.sizes import FULL, TOY

Section = Callable[[Bench], Iterator[Planned | Line]]

SECTIONS: dict[str, Section] = {
    "attention": attention.decode_attention,
    "extend": attention.extend_attention,
    "delta": kernels.delta_step,
    "states": kernels.state_copies,
    "hit": engine.hit,
    "decode": engine.decode,
    "sharing": engine.sharing,
    "store": kernels.elementwise,
    "linear": kernels.products,
    "experts": kernels.experts,
    "chunks": kernels.chunk_rule,
    "convolution": kernels.convolution,
}
"""In the order in which they run: what the targets are about first."""


def run_section(name: str, section: Section, bench: Bench, report: Report) -> None:
    """Run a section to its end or to its first exception, which is recorded."""
    bench.skipped = []
    entry: dict[str, Any] = {"status": "begun", "skipped": bench.skipped}
    report.sections[name] = entry
    start = time.perf_counter()
    try:
        for item in section(bench):
            for result in bench.measure(item) if isinstance(item, Planned) else (item,):
                report.add(name, result)
        entry["status"] = "done"
        bench.device.release()
    except Exception:  # the other sections run; a device that is lost fails in each of them
        entry["status"], entry["error"] = "failed", traceback.format_exc()
        print(entry["error"])
    entry["seconds"] = round(time.perf_counter() - start, 1)
    report.write()
    print(f"{name}: {entry['status']} in {entry['seconds']} s, {bench.left:.0f} s left", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections (default: all)")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: 540)")
    default = Path(os.environ.get("OUT", ".")) / "gpu.json"
    parser.add_argument(
        "--json", type=Path, default=default, metavar="FILE", help="for the figures (default: gpu.json in $OUT or here)"
    )
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU: tests the script, not the speed")
    args = parser.parse_args(arguments)
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --rehearse runs the script with toy sizes on a CPU")
    begin = time.perf_counter()
    device, sizes = (Cpu(), TOY) if args.rehearse else (Gpu(), FULL)
    with torch.no_grad():
        roofline = Roofline.measured(device, sizes)
        device.release()
        measured = {"copy GB/s": roofline.bandwidth / 1e9, "matmul TFLOP/s": roofline.matmul / 1e12}
        taken_on = machine(**device.describe(), kernels=os.environ.get("HYBRID_KERNELS", "auto"))
        report = Report(args.json, {"machine": taken_on, "rehearsal": args.rehearse, "roofline": measured})
        report.write()
        print(report.head, flush=True)
        bench = Bench(device, sizes, roofline, begin + args.budget, args.rehearse)
        for name in (name for name in SECTIONS if name in args.only):
            run_section(name, SECTIONS[name], bench, report)
    report.head["seconds"] = round(time.perf_counter() - begin, 1)
    report.write()
    print_table(COLUMNS, [line.row() for line in report.results], report.summary())
    print(f"{report.head['seconds']} s; figures in {args.json}; status {report.status}")
    return report.status


if __name__ == "__main__":
    sys.exit(main())
