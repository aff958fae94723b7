#!/usr/bin/env python
"""Our tree against SGLang's Rust core, on the same operations and the same trace.

    python bench/tree.py --peers DIR --peer-python PATH [--runs 3] [--only match,lock] [--all] [--json]
    python bench/tree.py --peers DIR --no-peer              # our own figures, without SGLang

DIR holds the peers' tree_bench.py, which measures; its README says how to make an environment with SGLang. PATH is the
Python of that environment: both sides run in it, one process at a time on one core, part by part in turns, every part
in a process of its own. Each figure is the median over the runs.

A value says how many times better ours is: their time over ours, our rate over theirs, their bytes over ours. Exit
status 1 when a target is missed, 2 when something could not be run.

Memory is measured here and not there: tree_bench.py measures a tree in a process that has just dropped another one, and
what that one left in the heap hides the growth. Here each tree gets a new process, and freed memory is returned first.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Line, arguments, finish

BENCH = Path(__file__).resolve().parent
TREE_BENCH = "tree_bench.py"
THEIRS, OURS = "sgl-rust", "tree_adapter:HybridTree"
PARTS = ("match", "insert", "lock", "evict", "mixed", "memory")
LEAVES = ((10_000, 128), (1_000, 4096))
"""Number of leaves and tokens of each, after a prompt that they share, with which memory is measured."""

QUIET = 0.85
"""A part that had less than this share of its core was disturbed: the rest is waiting for files."""

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
"""What is compared: names in the output of tree_bench.py, whose sum counts, and the ratio to reach. Pages of 64 tokens,
where the tree knows pages."""


class BenchError(Exception):
    """Something could not be run. The message says what to do."""


@dataclass(frozen=True)
class Runner:
    """How a part is run.

    Attributes:
        peers: the folder with tree_bench.py.
        python: runs both sides.
        core: both sides run on it, where the system can pin a process.
    """

    peers: Path
    python: str
    core: int

    def figures(self, factory: str, part: str) -> Figures:
        """The figures of one part for one tree, measured in a process of their own."""
        figures: dict[str, Any] = {}
        if part == "memory":
            for leaves in range(len(LEAVES)):
                options = ("--memory-of", factory, "--leaves", str(leaves))
                figures |= json.loads(self.spawn(factory, str(BENCH / "tree.py"), *options))
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "figures.json"
                self.spawn(factory, str(self.peers / TREE_BENCH), factory, "--only", part, "--json", str(file))
                figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
        return dict(flattened(figures))

    def spawn(self, factory: str, *command: str) -> str:
        """What a Python process for one tree prints.

        Raises:
            BenchError: it failed.
        """

        def pin() -> None:
            if sys.platform == "linux":
                os.sched_setaffinity(0, {self.core})

        done = subprocess.run(
            [self.python, "-W", "ignore", *command],
            env=self._environment(factory),
            capture_output=True,
            text=True,
            preexec_fn=pin,
        )
        if done.returncode:
            raise BenchError(f"{' '.join([self.python, *command])} failed:\n{done.stderr.strip()[-2000:]}")
        return done.stdout

    def _environment(self, factory: str) -> dict[str, str]:
        """The environment in which a tree finds its adapter, the peers' modules and, in a checkout, our package.

        A peer does not see our checkout: the libraries that it loads would take our `kernels` for the package of that
        name.
        """
        ours = [] if factory == THEIRS else [str(BENCH), str(BENCH.parent)]
        paths = [str(self.peers), os.environ.get("PYTHONPATH", ""), *ours]
        found = os.pathsep.join(path for path in paths if path)
        return {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def flattened(figures: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """One number per name: a pair is a median and a 99th percentile."""
    for name, value in figures.items():
        if isinstance(value, list):
            base = name.removesuffix(" p50/p99")
            yield f"{base} p50", value[0]
            yield f"{base} p99", value[1]
        else:
            yield name, value


def memory_of(factory: str, count: int, length: int) -> Figures:
    """Bytes per token by which this process grows as a tree takes in `count` leaves of `length` tokens. Run it once per
    process."""
    import psutil

    bench = importlib.import_module("tree_bench")
    prompt = 1024
    make = bench.factory_of(factory)
    make(page_size=64, kv_slots=4096, state_slots=8)  # what is loaded or made once does not belong to a tree
    shared = bench.tokens(prompt)
    requests = [shared + bench.tokens(length) for _ in range(count)]
    tree = make(page_size=64, kv_slots=(count + 1) * length + 3 * prompt, state_slots=count + 10)

    def resident() -> int:
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        return psutil.Process().memory_info().rss

    before = resident()
    for ids in requests:
        bench.put(tree, tree.key(ids), prompt + length)
    grown = resident() - before
    return {f"memory, {count} leaves of {length} tokens page64: B/token": round(grown / (count * length), 2)}


def measure(runner: Runner, sides: dict[str, str], parts: list[str], runs: int) -> tuple[dict[str, Figures], float]:
    """Median figures of each side, which take turns, part by part; and the smallest share of the core that a part
    had."""
    taken: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    least = 1.0
    for turn, part, side in ((turn, part, side) for turn in range(runs) for part in parts for side in sides):
        wall, cpu = time.monotonic(), cpu_of_children()
        for name, value in runner.figures(sides[side], part).items():
            taken[side].setdefault(name, []).append(value)
        share = (cpu_of_children() - cpu) / (time.monotonic() - wall)
        least = min(least, share)
        print(f"run {turn + 1} of {runs}: {part}, {side} ({share:.0%} of a core)", file=sys.stderr, flush=True)
    medians = {
        side: {name: statistics.median(values) for name, values in figures.items()} for side, figures in taken.items()
    }
    return medians, least


def cpu_of_children() -> float:
    """CPU seconds of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def line(name: str, names: tuple[str, ...], figures: dict[str, Figures], target: float | None) -> Line:
    """Compare what the sides have for the sum of some figures."""
    unit = "B/token" if name.startswith("memory") else names[0].rpartition(": ")[2] if ": " in names[0] else "us"
    sums = {side: sum(found[x] for x in names) for side, found in figures.items() if names[0] in found}
    theirs, ours = sums.get("theirs"), sums.get("ours")
    value = None
    if theirs and ours and unit != "hit rate":
        value = ours / theirs if unit.endswith(("/s", "/cpu-s")) else theirs / ours
    return Line(name, value, target if "theirs" in figures else None, medians={**sums}, unit=unit)


def lines_of(figures: dict[str, Figures], every: bool) -> list[Line]:
    """Those with a target, and after them `every` other figure."""
    lines = [line(name, names, figures, at_least) for name, (names, at_least) in GOALS.items()]
    lines = [one for one in lines if one.medians]
    if every:
        shown = {names for names, _ in GOALS.values()}
        lines += [line(name, (name,), figures, None) for name in figures["ours"] if (name,) not in shown]
    return lines


def peers_folder(named: str | None) -> Path:
    """The folder with tree_bench.py.

    Raises:
        BenchError: none is named, or it is not there.
    """
    folder = Path(named or "").resolve()
    if not named or not (folder / TREE_BENCH).is_file():
        found = f"{folder} has no {TREE_BENCH}" if named else "no peers"
        raise BenchError(f"{found}: name the folder with {TREE_BENCH} with --peers DIR, or in HYBRID_PEERS")
    return folder


def machine_of(runner: Runner, needed: str) -> dict[str, Any]:
    """What the figures are measured on.

    Raises:
        BenchError: the Python lacks a package.
    """
    code = (
        "import importlib.metadata as m, json, sys; sys.path[0] = sys.argv[1]; import common; "
        "print(json.dumps(common.machine(peer=f'{sys.argv[2]} {m.version(sys.argv[2])}')))"
    )
    done = subprocess.run([runner.python, "-c", code, str(BENCH), needed], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(
            f"{runner.python} cannot be used: it lacks {needed}.\nName a Python that has it with --peer-python "
            f"({runner.peers / 'README.md'} says how to make one); --no-peer measures our side alone, without SGLang"
        )
    return {**json.loads(done.stdout), "core": runner.core}


def parse() -> Namespace:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--peers", metavar="DIR", help=f"the folder with {TREE_BENCH} (default: HYBRID_PEERS)")
    parser.add_argument(
        "--peer-python", metavar="PATH", default=sys.executable, help="a Python that has SGLang (default: this one)"
    )
    parser.add_argument("--no-peer", action="store_true", help="our own figures alone, without targets")
    parser.add_argument("--ours", metavar="FACTORY", default=OURS, help=f"our tree (default: {OURS})")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas (default: %(default)s)")
    parser.add_argument("--core", type=int, default=0, help="core that everything runs on (default: 0)")
    parser.add_argument("--all", action="store_true", help="show the figures without a target too")
    alone = parser.add_argument_group("one tree's memory, in this process (how --only memory is measured)")
    alone.add_argument("--memory-of", metavar="FACTORY", help="print its B/token as JSON and exit")
    alone.add_argument("--leaves", type=int, choices=range(len(LEAVES)), default=1, help=f"which of {LEAVES}")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = [part for part in args.only if part not in PARTS]
    if unknown:
        parser.error(f"--only: there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    if args.runs < 1:
        parser.error(f"--runs must be at least 1, got {args.runs}")
    if not args.memory_of and sys.platform == "linux" and args.core not in os.sched_getaffinity(0):
        parser.error(f"--core {args.core}: this process may use {sorted(os.sched_getaffinity(0))}")
    return args


def main() -> int:
    args = parse()
    if args.memory_of:
        print(json.dumps(memory_of(args.memory_of, *LEAVES[args.leaves])))
        return 0
    sides = {"ours": args.ours} if args.no_peer else {"theirs": THEIRS, "ours": args.ours}
    try:
        runner = Runner(peers_folder(args.peers or os.environ.get("HYBRID_PEERS")), args.peer_python, args.core)
        taken_on = machine_of(runner, "numpy" if args.no_peer else "sglang")
        figures, share = measure(runner, sides, args.only, args.runs)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if share < QUIET:
        print(
            f"other processes used this core: a part had {share:.0%} of it. Measure again on a quiet machine.",
            file=sys.stderr,
        )
    return finish(lines_of(figures, args.all), taken_on, args.json, runs=args.runs, least_share_of_core=round(share, 3))


if __name__ == "__main__":
    sys.exit(main())
