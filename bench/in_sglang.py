#!/usr/bin/env python
"""The tree inside SGLang, on SGLang's own pools and requests: hits and CPU time next to those of its Rust core.

    .venv-sglang/bin/python bench/in_sglang.py --traces DIR [--runs 3]      # after make sglang; DIR: bench/traces.py

Each run of a side is a process of its own, in turns. The time of a request is what is spent in the tree core and in
deciding on admission. A value is the time over that of the Rust core. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from common import ROOT, Medians, arguments, finish, printed, ratio
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


def serve(folder: Path, name: str, side: str) -> dict[str, float]:
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
    hits = round(100 * served.hit_tokens / served.prompt_tokens, 1)
    return {"hits": hits, "us": spent[0] / 1000 / len(requests)}


def main() -> int:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--one", nargs=2, metavar=("TRACE", "SIDE"), help="one run of one side, printed as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(serve(args.traces, *args.one)))
        return 0
    command, lines = [sys.executable, "-W", "ignore", __file__, "--traces", args.traces, "--one"], []
    for name in CELLS:
        runs = [{side: printed([*command, name, side]) for side in SIDES} for _ in range(args.runs)]
        times: Medians = {side: statistics.median(run[side]["us"] for run in runs) for side in SIDES}
        hits = {"hits in %": {side: runs[0][side]["hits"] for side in SIDES}}
        for side, (_, _, goal) in SIDES.items():
            shown = {"at_most": True, "unit": "us", "details": hits}
            lines.append(ratio(f"{name}, {side}", times, side, "rust", goal, **shown))
    return finish(lines, args, runs=args.runs)


if __name__ == "__main__":
    sys.exit(main())
