#!/usr/bin/env python
"""Our tree against SGLang's Rust core, on the same operations and the same trace.

    python bench/tree.py --peer-python PATH [--runs 3] [--only match lock] [--json]
    python bench/tree.py --no-peer                          # our own figures, without SGLang

PATH is the Python of an environment with SGLang; bench/trees/sglang_tree.py says how to make one. Both sides run in it,
on one core, part by part in turns, every part in a process of its own (bench/trees/operations.py). Each figure is the
median over the runs; a value says how many times better ours is. Exit status 1 when a target is missed, 2 when
something could not be run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from typing import Any

from common import ROOT, Line, arguments, finish, printed, ratio

OPERATIONS = ROOT / "bench" / "trees" / "operations.py"
SIDES = {"theirs": "sglang_tree:rust", "ours": "hybrid_tree:HybridTree"}
PARTS = ("match", "insert", "lock", "evict", "mixed", "memory")

GOALS = {
    "match 8k, 1 node": 4,
    "match 128k, 1 node": 8,
    "match 8k, 32 nodes": 1.5,
    "match 128k, 32 nodes": 8,
    "insert 8k, split at 4k": 5,
    "insert 128k already cached, 512 nodes": 10,
    "lock + unlock, depth 1": 2,
    "lock + unlock, depth 100": 2,
    "evict one leaf per call, 100,000 leaves": 50,
    "evict leaves in bulk: leaves/s": 3,
    "evict inner checkpoints in bulk: states/s": 1,
    "mixed trace, 512 states: requests/s": 4,
    "memory, 1000 leaves of 4096: B/token": 2,
}
"""The ratio to reach for each figure of `operations.py`."""

VERSION = "import json, sys, importlib.metadata as m; print(json.dumps({'version': m.version(sys.argv[1])}))"


def run(args: Namespace, side: str, *command: object) -> Any:
    """What a Python process for one side prints, on the core that everything runs on. A peer does not see our checkout:
    the libraries that it loads would take our `kernels` for the package of that name."""
    found = [os.environ.get("PYTHONPATH", ""), *([str(ROOT)] if side == "ours" else [])]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, found)), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    pin = (lambda: os.sched_setaffinity(0, {args.core})) if sys.platform == "linux" else None
    return printed([args.peer_python, "-W", "ignore", *command], env={**os.environ, **own}, preexec_fn=pin)


def measure(args: Namespace, sides: list[str]) -> list[Line]:
    """The sides take turns, part by part."""
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn, part, side in ((turn, part, side) for turn in range(args.runs) for part in args.only for side in sides):
        print(f"run {turn + 1} of {args.runs}: {part}, {side}", file=sys.stderr, flush=True)
        for name, value in run(args, side, OPERATIONS, SIDES[side], part).items():
            taken[name][side].append(value)
    lines = []
    for name, found in taken.items():
        unit = name.rpartition(": ")[2] if ": " in name else "us"
        over, under = ("ours", "theirs") if unit.endswith("/s") else ("theirs", "ours")
        medians = {"theirs": None, **{side: statistics.median(values) for side, values in found.items()}}
        lines.append(ratio(name, medians, over, under, None if args.no_peer else GOALS[name], unit=unit))
    return lines


def main() -> int:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--peer-python", metavar="PATH", default=sys.executable, help="with SGLang (default: this one)")
    parser.add_argument("--no-peer", action="store_true", help="our own figures alone, without targets")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--core", type=int, default=0, help="core that everything runs on (default: 0)")
    args = parser.parse_args()
    needed = "numpy" if args.no_peer else "sglang"
    try:
        version = run(args, "theirs", "-c", VERSION, needed)
        lines = measure(args, ["ours"] if args.no_peer else [*SIDES])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{error}\n{getattr(error, 'stderr', '')[-2000:]}", file=sys.stderr)
        print("--peer-python names a Python that has SGLang; --no-peer measures our side alone", file=sys.stderr)
        return 2
    return finish(lines, args, core=args.core, peer=f"{needed} {version['version']}", runs=args.runs)


if __name__ == "__main__":
    sys.exit(main())
