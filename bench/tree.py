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

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import Line, arguments, finish, machine, ratio

BENCH = Path(__file__).resolve().parent
TREES = BENCH / "trees"
THEIRS, OURS = "sglang_tree:rust", "hybrid_tree:HybridTree"
PARTS = ("match", "insert", "lock", "evict", "mixed", "memory")

Figures = dict[str, float]

GOALS: dict[str, tuple[tuple[str, ...], float]] = {
    "match 8k, 1 node": (("match page64 len8192 nodes1",), 4),
    "match 128k, 1 node": (("match page64 len131072 nodes1",), 8),
    "match 8k, 32 nodes": (("match page64 len8192 nodes32",), 1.5),
    "match 128k, 32 nodes": (("match page64 len131072 nodes32",), 3),
    "insert 8k, split at 4k": (("insert 8k, split at 4k page64",), 3),
    "insert 128k already cached, 512 nodes": (("insert 128k already cached, 512 nodes page64",), 10),
    "lock + unlock, depth 1": (("lock depth1", "unlock depth1"), 2),
    "lock + unlock, depth 100": (("lock depth100", "unlock depth100"), 2),
    "evict one leaf per call, 100,000 leaves": (("evict one leaf per call, 100000 leaves",), 50),
    "evict leaves in bulk: leaves/s": (("evict KV in bulk, 10k leaves: leaves/s",), 1),
    "evict inner checkpoints in bulk: states/s": (("evict inner states in bulk: states/s",), 1),
    "mixed trace, 512 states: requests/s": (("mixed page64 states512: requests/s",), 2),
    "memory, 1000 leaves of 4096: B/token": (("memory, 1000 leaves of 4096 tokens page64: B/token",), 2),
}
"""What is compared: names in the output of operations.py, whose sum counts, and the ratio to reach. Pages of 64 tokens,
where the tree knows pages."""


def spawn(args: Namespace, factory: str, *command: str) -> str:
    """What a Python process for one tree prints, on the core that everything runs on. A peer does not see our checkout:
    the libraries that it loads would take our `kernels` for the package of that name."""
    ours = [] if factory == THEIRS else [str(BENCH.parent)]
    found = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH", ""), *ours) if path)
    return subprocess.run(
        [args.peer_python, "-W", "ignore", *command],
        env={**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=(lambda: os.sched_setaffinity(0, {args.core})) if sys.platform == "linux" else None,
    ).stdout


def figures_of(args: Namespace, factory: str, part: str) -> Figures:
    """The figures of one part for one tree, measured in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        spawn(args, factory, str(TREES / "operations.py"), factory, "--only", part, "--json", str(file))
        measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]
    compared = {name for names, _ in GOALS.values() for name in names}
    return {name: value for name, value in measured.items() if name in compared}


def measure(args: Namespace, sides: dict[str, str]) -> dict[str, Figures]:
    """Median figures of each side, which take turns, part by part."""
    taken: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for turn, part, side in ((turn, part, side) for turn in range(args.runs) for part in args.only for side in sides):
        print(f"run {turn + 1} of {args.runs}: {part}, {side}", file=sys.stderr, flush=True)
        for name, value in figures_of(args, sides[side], part).items():
            taken[side].setdefault(name, []).append(value)
    return {side: {name: statistics.median(values) for name, values in found.items()} for side, found in taken.items()}


def line(name: str, names: tuple[str, ...], figures: dict[str, Figures], target: float) -> Line:
    """Compare what the sides have for the sum of some figures."""
    unit = names[0].rpartition(": ")[2] if ": " in names[0] else "us"
    sums = {side: sum(found[x] for x in names) for side, found in figures.items() if names[0] in found}
    if len(sums) < 2:
        return Line(name, None, target if "theirs" in figures else None, medians={**sums}, unit=unit)
    over, under = ("ours", "theirs") if unit.endswith("/s") else ("theirs", "ours")
    return ratio(name, {**sums}, over, under, target, unit=unit)


def parse() -> Namespace:
    parser = arguments(__doc__, runs=3)
    parser.add_argument(
        "--peer-python", metavar="PATH", default=sys.executable, help="a Python that has SGLang (default: this one)"
    )
    parser.add_argument("--no-peer", action="store_true", help="our own figures alone, without targets")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--core", type=int, default=0, help="core that everything runs on (default: 0)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    sides = {"ours": OURS} if args.no_peer else {"theirs": THEIRS, "ours": OURS}
    needed = "numpy" if args.no_peer else "sglang"
    try:
        code = f"import importlib.metadata as m; print('{needed}', m.version('{needed}'))"
        taken_on = machine(core=args.core, peer=spawn(args, THEIRS, "-c", code).strip())
        figures = measure(args, sides)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{error}\n{getattr(error, 'stderr', '')[-2000:]}", file=sys.stderr)
        print("--peer-python names a Python that has SGLang; --no-peer measures our side alone", file=sys.stderr)
        return 2
    lines = [line(name, names, figures, target) for name, (names, target) in GOALS.items()]
    return finish([one for one in lines if one.medians], taken_on, args.json, runs=args.runs)


if __name__ == "__main__":
    sys.exit(main())
