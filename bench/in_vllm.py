#!/usr/bin/env python
"""The scheduler inside vLLM, on vLLM's own manager and pool: hits and CPU time next to those of its LRU.

    .venv-vllm/bin/python bench/in_vllm.py --traces DIR         # after make vllm; DIR: bench/traces.py
    .venv-vllm/bin/python bench/in_vllm.py --traces DIR --one lmsys 3 lhd --width 8
    .venv-vllm/bin/python bench/in_vllm.py --sessions SESSIONS --limit 1000 --width 8      # recorded sessions of agents

Each run of a side is a process of its own. The time of a request is that of all of vLLM's scheduler and of the model's
imitation; what the plugin costs is the difference to vLLM alone. Of recorded sessions (as `hybrid doctor` reads them;
Qwen3.5-9B) ours has to hit what vLLM does, less half a point. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from common import ROOT, Line, arguments, check, finish, printed
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
    "ends": {},
    "times": {},
}
"""Options of the plugin: `lru` keeps the states that vLLM keeps, and evicts as vLLM does. `ends` and `times` are `lhd`
with hints of recorded sessions: which request is the last of its conversation; and when the next one comes too."""


GIB = (16.0, 32.0, 64.0)
"""Memory for recorded sessions."""

SESSIONS = "sessions"
"""The name of recorded sessions among traces."""


def hints_of(side: str, given: Any) -> dict[str, Any] | None:
    """The hints of a recorded request."""
    if side not in ("ends", "times"):
        return None
    if given.turn.next_in is None:
        return {"hybrid_release": True}
    return {"hybrid_expect_resume": given.turn.next_in} if side == "times" else None


def serve(source: Path, name: str, size: float, side: str, width: int, limit: int | None) -> dict[str, Any]:
    """Serve a trace of a folder with `size` gigabytes, or recorded sessions with as many GiB. Returns the token hit
    rate in percent, milliseconds of CPU per request and per step, and what was counted."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.vllm_served import Served

    if name == SESSIONS:
        from hybrid.doctor import Traffic

        logged = [request for request, _ in islice(Traffic.read([source]), limit)]
        served = Served(size * 2**30, SIDES[side])
        start = time.process_time()
        served.serve_sessions(logged, width, partial(hints_of, side))
    else:
        given = [(ids[:num_prompt], ids[num_prompt:]) for ids, num_prompt in load_trace(name, source)][:limit]
        served = Served(size * 1e9, SIDES[side], at_once=width > 1, chunk=8192 if width == 1 else 4096)
        start = time.process_time()
        served.serve([(ids, answer[: 24 if width > 1 else None]) for ids, answer in given], width)
    took, num_requests = time.process_time() - start, len(logged if name == SESSIONS else given)
    mirror = served.mirror
    counted = {} if mirror is None else {"differing": mirror.counts.differing, "apart": mirror.counts.set_apart}
    if mirror is not None:
        counted["failure"] = mirror.failure and repr(mirror.failure)
        counted["wrong"] = mirror.tree.check()
    return {
        "hits": round(100 * served.hit_tokens / served.prompt_tokens, 2),
        "requests": num_requests,
        "ms": round(1000 * took / num_requests, 3),
        "ms per step": round(1000 * took / served.passes, 3),
        "leaked": served.num_leaked,
        "preemptions": served.preemptions,
        **counted,
    }


def main() -> int:
    parser = arguments(__doc__)
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--traces", type=Path, help="the folder of the traces")
    sources.add_argument("--sessions", type=Path, help="recorded sessions")
    parser.add_argument("--one", nargs=3, metavar=("TRACE", "GB", "SIDE"), help="one run of one side, printed as JSON")
    parser.add_argument("--width", type=int, default=1, help="requests at a time")
    parser.add_argument("--limit", type=int, help="requests of a trace")
    args = parser.parse_args()
    if args.one:
        name, gigabytes, side = args.one
        print(json.dumps(serve(args.traces or args.sessions, name, float(gigabytes), side, args.width, args.limit)))
        return 0
    source = ["--sessions", args.sessions] if args.sessions else ["--traces", args.traces]
    command, lines = [sys.executable, "-W", "ignore", __file__, *source, "--width", args.width], list[Line]()
    command += ["--limit", args.limit] if args.limit else []
    if args.sessions:
        for size in GIB:
            runs = {side: printed([*command, "--one", SESSIONS, size, side]) for side in ("vllm", "lhd")}
            wanted = runs["vllm"]["hits"] - 0.5
            lines.append(check(f"{size:g} GiB: lhd is not behind", runs["lhd"]["hits"] >= wanted, str(runs)))
        return finish(lines, args)
    for (name, gigabytes), goal in CELLS.items():
        runs = {side: printed([*command, "--one", name, gigabytes, side]) for side in ("vllm", "lru", "lhd")}
        hits = {side: run["hits"] for side, run in runs.items()}
        cell = f"{name}, {gigabytes:g} GB"
        lines.append(check(f"{cell}: lhd reaches {goal}", hits["lhd"] >= goal, str(hits)))
        lines.append(check(f"{cell}: lru is not behind vLLM", hits["lru"] >= hits["vllm"] - 0.7, str(hits)))
        sound = all(not run["leaked"] and not run.get("failure") and not run.get("wrong") for run in runs.values())
        lines.append(check(f"{cell}: no leak, no failure", sound, str(runs["lhd"])))
    return finish(lines, args)


if __name__ == "__main__":
    sys.exit(main())
