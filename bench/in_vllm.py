#!/usr/bin/env python
"""The scheduler inside vLLM, on vLLM's own manager and pool: hits and CPU time next to those of its LRU.

    .venv-vllm/bin/python bench/in_vllm.py --traces DIR         # after make vllm; DIR: bench/traces.py
    .venv-vllm/bin/python bench/in_vllm.py --traces DIR --one lmsys 3 lhd --width 8

Each run of a side is a process of its own. The time of a request is that of all of vLLM's scheduler and of the model's
imitation; what the plugin costs is the difference to vLLM alone. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, arguments, check, finish, printed
from hit_rate import load_trace

CELLS = {
    ("lmsys", 3.0): 38.4,
    ("lmsys", 6.0): 62.9,
    ("fewshot", 4.0): 62.2,
    ("fewshot", 8.0): 79.7,
    ("swebench", 10.0): 31.4,
    ("swebench_nc", 15.0): 53.3,
    ("sharegpt", 4.0): 40.9,
}
"""Trace and gigabytes, and the hit rate that is to be reached, in percent."""

SIDES: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "lru": {"policy": "lru", "anchors": False, "answers": False, "siblings": False, "ghost_branches": False},
    "lhd": {},
}
"""Options of the plugin: `lru` keeps the states that vLLM keeps, and evicts as vLLM does."""


def serve(folder: Path, name: str, gigabytes: float, side: str, width: int, limit: int | None) -> dict[str, Any]:
    """Serve a trace. Returns the token hit rate in percent, milliseconds of CPU per request, and what was counted."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.vllm_served import Served

    given = [(ids[:num_prompt], ids[num_prompt:]) for ids, num_prompt in load_trace(name, folder)][:limit]
    served = Served(gigabytes * 1e9, SIDES[side], at_once=width > 1, chunk=8192 if width == 1 else 4096)
    start = time.process_time()
    served.serve([(ids, answer[: 24 if width > 1 else None]) for ids, answer in given], width)
    took = time.process_time() - start
    mirror = served.mirror
    counted = {} if mirror is None else {"differing": mirror.counts.differing, "apart": mirror.counts.set_apart}
    if mirror is not None:
        counted["failure"] = mirror.failure and repr(mirror.failure)
        counted["wrong"] = mirror.tree.check()
    return {
        "hits": round(100 * served.hit_tokens / served.prompt_tokens, 2),
        "ms": round(1000 * took / len(given), 3),
        "leaked": served.num_leaked,
        "preemptions": served.preemptions,
        **counted,
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--one", nargs=3, metavar=("TRACE", "GB", "SIDE"), help="one run of one side, printed as JSON")
    parser.add_argument("--width", type=int, default=1, help="requests at a time")
    parser.add_argument("--limit", type=int, help="requests of a trace")
    args = parser.parse_args()
    if args.one:
        name, gigabytes, side = args.one
        print(json.dumps(serve(args.traces, name, float(gigabytes), side, args.width, args.limit)))
        return 0
    command, lines = [sys.executable, "-W", "ignore", __file__, "--traces", args.traces, "--width", args.width], []
    for (name, gigabytes), goal in CELLS.items():
        runs = {side: printed([*command, "--one", name, gigabytes, side]) for side in SIDES}
        hits = {side: run["hits"] for side, run in runs.items()}
        cell = f"{name}, {gigabytes:g} GB"
        lines.append(check(f"{cell}: lhd reaches {goal}", hits["lhd"] >= goal, str(hits)))
        lines.append(check(f"{cell}: lru is vLLM's", abs(hits["lru"] - hits["vllm"]) <= 0.7, str(hits)))
        sound = all(not run["leaked"] and not run.get("failure") and not run.get("wrong") for run in runs.values())
        lines.append(check(f"{cell}: no leak, no failure", sound, str(runs["lhd"])))
    return finish(lines, args)


if __name__ == "__main__":
    sys.exit(main())
