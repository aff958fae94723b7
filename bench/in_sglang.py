#!/usr/bin/env python
"""The tree inside SGLang, on SGLang's own pools and requests: hits and CPU time next to those of its Rust core.

    .venv-sglang/bin/python bench/in_sglang.py --traces DIR [--runs 3]      # after make sglang; DIR: bench/traces.py
    .venv-sglang/bin/python bench/in_sglang.py --sessions SESSIONS [--limit 1000] [--width 8]    # of agents, recorded

Each run of a side is a process of its own, in turns. The time of a request is what is spent in the tree core and in
deciding on admission. A value is the time over that of the Rust core. Recorded sessions are served as `hybrid doctor`
does, with the sizes of Qwen3.5-9B and their times as the clock; ours has to hit what the Rust core does, less half a
point. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from array import array
from itertools import islice
from pathlib import Path
from typing import Any

from common import ROOT, Line, Medians, arguments, check, finish, printed, ratio
from hit_rate import load_trace
from traces import ADVERSARIAL
from traces import MEMORY as MEMORY_OF_ADVERSARIAL

CELLS = {"lmsys": 3.0, "swebench": 10.0}
SIDES = {"rust": ("rust", "lru", None), "lru": ("hybrid", "lru", 1.3), "lhd": ("hybrid", "lhd", 2.0)}
"""The tree core, the policy, and the largest ratio to the time of the Rust core."""


MEMORY = {**CELLS, **dict.fromkeys(ADVERSARIAL, MEMORY_OF_ADVERSARIAL)}
"""Gigabytes of each trace. The Rust core's hits are to be reached, less half a point."""

GIB = (16.0, 32.0, 64.0)
"""Memory for recorded sessions."""


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

    served, spent = Served(Setting(*SIDES[side][:2], *budget(MEMORY[name], 64))), [0, 0]
    core, requests = served.cache.tree_core, load_trace(name, folder)
    owned = [(core, method) for method in dir(type(core)) if method[0] != "_" and callable(getattr(type(core), method))]
    for owner, method in [*owned, *((one, "admit") for one in served.cache.components.values() if "admit" in dir(one))]:
        clocked(owner, method, spent)
    for ids, num_prompt in requests:
        served.serve(array("q", ids), num_prompt)
    hits = round(100 * served.hit_tokens / served.prompt_tokens, 1)
    return {"hits": hits, "us": spent[0] / 1000 / len(requests)}


def serve_sessions(source: Path, gib: float, side: str, width: int, limit: int | None) -> dict[str, Any]:
    """Serve recorded sessions, as many requests at a time: of a conversation one. Returns the token hit rate in
    percent, and milliseconds of CPU per request in all of the replay."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.sglang_absent import imitate

    imitate()
    from hybrid.doctor.arrivals import Pace
    from hybrid.doctor.installed_sglang import InstalledSglang
    from hybrid.doctor.sizes import Sizes
    from hybrid.doctor.traffic import Traffic
    from hybrid.sglang.plugin import register

    class Timed(InstalledSglang):
        """The times of requests are the clock."""

        def begin(self, request: Any, budget: int | None = None) -> Any:
            if side != "rust":
                self.cache.tree_core.clock = lambda: request.time
            return super().begin(request, budget)

    register()
    traffic, sizes = Traffic.read([source]), Sizes(32768, 51511296, 8, 24)
    given = {"rust": {}, "lru": {"policy": "lru"}, "lhd": {}}[side]
    given |= {"radix_cache_backend": "hybrid"} if side != "rust" else {}
    arrivals = Pace(concurrency=width).arrivals(traffic, islice(traffic, limit))
    served = Timed(sizes, int(gib * 2**30), arrivals, **given)
    start, number, hits, tokens = time.process_time(), 0, 0, 0
    for arrival, hit, _ in served.run():
        number, hits, tokens = number + 1, hits + hit.num_tokens, tokens + arrival.request.num_prompt
    took = time.process_time() - start
    served.cache.sanity_check()
    return {"hits": round(100 * hits / tokens, 2), "requests": number, "ms": round(1000 * took / number, 2)}


def main() -> int:
    parser = arguments(__doc__, runs=3)
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--traces", type=Path, help="the folder of the traces")
    sources.add_argument("--sessions", type=Path, help="recorded sessions")
    parser.add_argument(
        "--one", nargs=2, metavar=("WHAT", "SIDE"), help="one run of one side, printed as JSON: a trace, or GiB"
    )
    parser.add_argument("--width", type=int, default=1, help="requests of sessions at a time")
    parser.add_argument("--limit", type=int, help="requests of sessions")
    args = parser.parse_args()
    if args.one:
        what, side = args.one
        found: dict[str, Any] = (
            serve_sessions(args.sessions, float(what), side, args.width, args.limit)
            if args.sessions
            else serve(args.traces, what, side)
        )
        print(json.dumps(found))
        return 0
    lines = list[Line]()
    if args.sessions:
        command = [sys.executable, "-W", "ignore", __file__, "--sessions", args.sessions, "--width", args.width]
        command += ["--limit", args.limit] if args.limit else []
        for gib in GIB:
            cells = {side: printed([*command, "--one", gib, side]) for side in ("rust", "lhd")}
            is_ahead = cells["lhd"]["hits"] >= cells["rust"]["hits"] - 0.5
            lines.append(check(f"{gib:g} GiB: lhd is not behind", is_ahead, str(cells)))
        return finish(lines, args)
    command = [sys.executable, "-W", "ignore", __file__, "--traces", args.traces, "--one"]
    for name in MEMORY:
        if name not in CELLS:
            cells = {side: printed([*command, name, side]) for side in ("rust", "lhd")}
            is_ahead = cells["lhd"]["hits"] >= cells["rust"]["hits"] - 0.5
            lines.append(check(f"{name}: lhd is not behind", is_ahead, str(cells)))
            continue
        runs = [{side: printed([*command, name, side]) for side in SIDES} for _ in range(args.runs)]
        times: Medians = {side: statistics.median(run[side]["us"] for run in runs) for side in SIDES}
        hits = {"hits in %": {side: runs[0][side]["hits"] for side in SIDES}}
        for side, (_, _, goal) in SIDES.items():
            shown = {"at_most": True, "unit": "us", "details": hits}
            lines.append(ratio(f"{name}, {side}", times, side, "rust", goal, **shown))
    return finish(lines, args, runs=args.runs)


if __name__ == "__main__":
    sys.exit(main())
