#!/usr/bin/env python
"""The tree inside SGLang, on SGLang's own pools and requests: hits and CPU time next to those of its Rust core.

    .venv-sglang/bin/python bench/in_sglang.py --traces DIR [--runs 3]      # after make sglang; DIR: bench/traces.py

Each run of a side is a process of its own, in turns. The time of a request is what is spent in the tree core and in
deciding on admission. A value is the time over that of the Rust core. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from common import ROOT, Line, arguments, finish, machine
from hit_rate import load_trace

CELLS = {"lmsys": 3.0, "swebench": 10.0}
SIDES = {"rust": ("rust", "lru", None), "lru": ("hybrid", "lru", 1.3), "lhd": ("hybrid", "lhd", 2.0)}
"""The tree core, the policy, and the largest ratio to the time of the Rust core."""


def clocked(owner: Any, name: str, spent: list[int]) -> None:
    """Add the CPU time of a method's outermost calls to `spent`, nanoseconds and depth."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        spent[1] += 1
        start = time.process_time_ns()
        try:
            return method(*args, **kwargs)
        finally:
            spent[1] -= 1
            spent[0] += 0 if spent[1] else time.process_time_ns() - start

    setattr(owner, name, call)


def serve(folder: Path, name: str, side: str) -> tuple[float, float]:
    """Serve a trace. Returns the token hit rate in percent, and microseconds in the tree per request."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.sglang_absent import imitate

    imitate()
    from support.sglang_served import Served, Setting, budget

    served, spent = Served(Setting(*SIDES[side][:2], *budget(CELLS[name], 64))), [0, 0]
    core, requests = served.cache.tree_core, load_trace(name, folder)
    owned = [(core, method) for method in dir(type(core)) if method[0] != "_" and callable(getattr(type(core), method))]
    for owner, method in [*owned, *((one, "admit") for one in served.cache.components.values() if "admit" in dir(one))]:
        clocked(owner, method, spent)
    for ids, num_prompt in requests:
        served.serve(array("q", ids), num_prompt)
    return round(100 * served.hit_tokens / served.prompt_tokens, 1), spent[0] / 1000 / len(requests)


def main() -> int:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--one", nargs=2, metavar=("TRACE", "SIDE"), help="one run of one side, printed as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(serve(args.traces, *args.one)))
        return 0
    command, lines = [sys.executable, "-W", "ignore", __file__, "--traces", str(args.traces), "--one"], []
    for name in CELLS:
        runs: dict[str, list[list[float]]] = {side: [] for side in SIDES}
        for side in [*SIDES] * args.runs:
            shown = subprocess.run([*command, name, side], stdout=subprocess.PIPE, text=True, check=True).stdout
            runs[side].append(json.loads(shown))
        times = {side: statistics.median(us for _, us in found) for side, found in runs.items()}
        hits = {"hits in %": {side: found[0][0] for side, found in runs.items()}}
        for side, (_, _, goal) in SIDES.items():
            value = times[side] / times["rust"]
            lines.append(Line(f"{name}, {side}", value, goal, True, medians=times, unit="us", details=hits))
    return finish(lines, machine(), args.json, runs=args.runs)


if __name__ == "__main__":
    sys.exit(main())
