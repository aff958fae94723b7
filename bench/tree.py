#!/usr/bin/env python
"""Our tree against SGLang's Rust core, on the same operations and the same trace.

    python bench/tree.py --peers DIR --peer-python PATH [--runs 3] [--only match,lock] [--all] [--json]
    python bench/tree.py --peers DIR --no-peer              # our own figures, without SGLang

DIR holds the peers' tree_bench.py, which does the measuring; its README says how to make an environment with SGLang.
PATH is the Python of that environment: both sides run in it, one process at a time on one core, part by part in turns,
every part in a process of its own. Each figure is the median over the runs.

A ratio says how many times better we are: their time over ours, our rate over theirs, their bytes over ours. Exit
status 1 when a target is missed, 2 when something could not be run.

Memory is measured here and not there: tree_bench.py measures a tree in a process that has just dropped another one, and
what that one left to the heap hides the growth. Here each tree gets a fresh process, and freed memory goes back first.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
TREE_BENCH = "tree_bench.py"
THEIRS, OURS = "sgl-rust", "tree_adapter:HybridTree"
PARTS = ("match", "insert", "lock", "evict", "mixed", "memory")
LEAVES = ((10_000, 128), (1_000, 4096))
"""How many leaves of how many tokens, behind a prompt that they share, memory is measured with."""

QUIET = 0.85
"""A part that had less of its core was disturbed: what is left is waiting for files."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Goal:
    """What is compared, and how much better we want to be.

    Attributes:
        figures: names in the output of tree_bench.py; their sum is what counts.
        at_least: the ratio to reach.
    """

    name: str
    figures: tuple[str, ...]
    at_least: float


GOALS = (
    Goal("match 8k, 1 node", ("match page64 len8192 nodes1",), 4),
    Goal("match 128k, 1 node", ("match page64 len131072 nodes1",), 8),
    Goal("match 8k, 32 nodes", ("match page64 len8192 nodes32",), 1.5),
    Goal("match 128k, 32 nodes", ("match page64 len131072 nodes32",), 3),
    Goal("insert 8k, split at 4k", ("insert 8k, split at 4k page64",), 3),
    Goal("insert 128k already cached, 512 nodes", ("insert 128k already cached, 512 nodes page64",), 10),
    Goal("lock + unlock, depth 1", ("lock depth1", "unlock depth1"), 2),
    Goal("lock + unlock, depth 100", ("lock depth100", "unlock depth100"), 2),
    Goal("evict one leaf per call, 100,000 leaves", ("evict one leaf per call, 100000 leaves",), 50),
    Goal("evict leaves in bulk: leaves/s", ("evict KV in bulk, 10k leaves: leaves/s",), 1),
    Goal("evict inner checkpoints in bulk: states/s", ("evict inner states in bulk: states/s",), 1),
    Goal("mixed trace, 512 states: requests/s", ("mixed page64 states512: requests/s",), 2),
    Goal("memory, 1000 leaves of 4096: B/token", ("memory, 1000 leaves of 4096 tokens page64: B/token",), 2),
)
"""Pages of 64 tokens, where the tree knows pages."""


@dataclass(frozen=True)
class Line:
    """One row of the result.

    Attributes:
        theirs, ours: medians in `unit`; None where that side was not run.
        ratio: how many times better we are; None where a side is missing, or where better has no meaning.
        target: the least ratio, for those that have one.
    """

    name: str
    unit: str
    theirs: float | None
    ours: float | None
    ratio: float | None
    target: float | None

    @property
    def reached(self) -> bool | None:
        """None where there is nothing to reach, or nothing to compare with."""
        return None if self.ratio is None or self.target is None else self.ratio >= self.target


class BenchError(Exception):
    """Something could not be run. The message says what to do."""


@dataclass(frozen=True)
class Bench:
    """How a part is run.

    Attributes:
        peers: the folder with tree_bench.py.
        python: runs both sides.
        core: both sides run on it, where the system can pin a process.
    """

    peers: Path
    python: str
    core: int

    def run(self, factory: str, part: str) -> Figures:
        """The figures of one part for one tree, taken in a process of their own."""
        figures: dict[str, Any] = {}
        if part == "memory":
            for leaves in range(len(LEAVES)):
                figures |= json.loads(
                    self._spawn(factory, str(BENCH / "tree.py"), "--memory-of", factory, "--leaves", str(leaves))
                )
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "figures.json"
                self._spawn(factory, str(self.peers / TREE_BENCH), factory, "--only", part, "--json", str(file))
                figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
        return dict(flattened(figures))

    def _spawn(self, factory: str, *command: str) -> str:
        """What a Python process for one tree prints.

        Raises:
            BenchError: it failed.
        """
        done = subprocess.run(
            [self.python, "-W", "ignore", *command],
            env=self._environment(factory),
            capture_output=True,
            text=True,
            preexec_fn=self._pin,
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
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _pin(self) -> None:
        if sys.platform == "linux":
            os.sched_setaffinity(0, {self.core})


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
    make(page_size=64, kv_slots=4096, state_slots=8)  # what is loaded or made once is no tree's
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


def measure(bench: Bench, sides: dict[str, str], parts: list[str], runs: int) -> tuple[dict[str, Figures], float]:
    """Median figures of each side, which take turns, part by part; and the least share of the core that a part had."""
    taken: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    started = time.monotonic()
    least = 1.0
    for run in range(runs):
        for part in parts:
            for side, factory in sides.items():
                wall, cpu = time.monotonic(), cpu_of_children()
                for name, value in bench.run(factory, part).items():
                    taken[side].setdefault(name, []).append(value)
                now = time.monotonic()
                share = (cpu_of_children() - cpu) / (now - wall)
                least = min(least, share)
                print(
                    f"{now - started:4.0f} s  run {run + 1} of {runs}: {part}, {side} ({share:.0%} of a core)",
                    file=sys.stderr,
                    flush=True,
                )
    medians = {
        side: {name: statistics.median(values) for name, values in figures.items()} for side, figures in taken.items()
    }
    return medians, least


def cpu_of_children() -> float:
    """CPU seconds of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def unit_of(figure: str) -> str:
    if figure.startswith("memory"):
        return "B/token"
    return figure.rpartition(": ")[2] if ": " in figure else "us"


def line(name: str, figures: tuple[str, ...], theirs: Figures, ours: Figures, target: float | None) -> Line:
    """Compare what two sides have for the sum of some figures."""
    unit = unit_of(figures[0])
    a, b = (sum(side[figure] for figure in figures) if figures[0] in side else None for side in (theirs, ours))
    ratio = None
    if a and b and unit != "hit rate":
        ratio = b / a if unit.endswith(("/s", "/cpu-s")) else a / b
    return Line(name, unit, a, b, ratio, target)


def lines_of(theirs: Figures, ours: Figures, every: bool) -> list[Line]:
    """Those with a target, and after them `every` other figure."""
    goals = [goal for goal in GOALS if goal.figures[0] in ours]
    lines = [line(goal.name, goal.figures, theirs, ours, goal.at_least) for goal in goals]
    if every:
        told = {goal.figures for goal in goals}
        lines += [line(name, (name,), theirs, ours, None) for name in ours if (name,) not in told]
    return lines


def machine(bench: Bench, no_peer: bool) -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [row.split(":")[1].strip() for row in rows if row.startswith("model name")]
        cpu = names[0] if names else cpu
    distributions = ["numpy"] if no_peer else ["numpy", "sglang"]
    code = (
        "import importlib.metadata as m, json, platform, sys; "
        "print(json.dumps({'python': platform.python_version(), **{name: m.version(name) for name in sys.argv[1:]}}))"
    )
    done = subprocess.run([bench.python, "-c", code, *distributions], capture_output=True, text=True)
    if done.returncode:
        raise BenchError(
            f"{bench.python} cannot be used: it lacks one of {', '.join(distributions)}.\nName a Python that has them "
            f"with --peer-python ({bench.peers / 'README.md'} says how to make one); --no-peer measures our side "
            "alone, without SGLang"
        )
    return {"cpu": cpu, "cores": os.cpu_count(), "core": bench.core, **json.loads(done.stdout)}


def peers_folder(named: str | None) -> Path:
    """The folder with tree_bench.py.

    Raises:
        BenchError: none is named, or it is not there.
    """
    if not named:
        raise BenchError(f"no peers: name the folder with {TREE_BENCH} with --peers DIR, or in HYBRID_PEERS")
    folder = Path(named).resolve()
    if not (folder / TREE_BENCH).is_file():
        raise BenchError(
            f"{folder} holds no {TREE_BENCH}: name the folder that does with --peers DIR, or in HYBRID_PEERS"
        )
    return folder


def print_table(lines: list[Line], taken_on: dict[str, Any], runs: int) -> None:
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"

    table = Table("operation", "unit")
    for title in ("theirs", "ours", "ratio", "target"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in lines:
        target = "" if row.target is None else f">= {row.target:g}"
        verdict = {True: "ok", False: "MISS", None: ""}[row.reached]
        table.add_row(row.name, row.unit, number(row.theirs), number(row.ours), number(row.ratio), target, verdict)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"medians of {runs} runs; {taken_on}", highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="DIR", help=f"the folder with {TREE_BENCH} (default: HYBRID_PEERS)")
    parser.add_argument(
        "--peer-python", metavar="PATH", default=sys.executable, help="a Python that has SGLang (default: this one)"
    )
    parser.add_argument("--no-peer", action="store_true", help="our own figures alone, which reach no target")
    parser.add_argument("--ours", metavar="FACTORY", default=OURS, help=f"our tree (default: {OURS})")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs to take the median of (default: 3)")
    parser.add_argument("--core", type=int, default=0, help="core that everything runs on (default: 0)")
    parser.add_argument("--all", action="store_true", help="show the figures without a target too")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
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
    args = arguments()
    if args.memory_of:
        print(json.dumps(memory_of(args.memory_of, *LEAVES[args.leaves])))
        return 0
    sides = {"ours": args.ours} if args.no_peer else {"theirs": THEIRS, "ours": args.ours}
    try:
        bench = Bench(peers_folder(args.peers or os.environ.get("HYBRID_PEERS")), args.peer_python, args.core)
        taken_on = machine(bench, args.no_peer)
        figures, share = measure(bench, sides, args.only, args.runs)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    theirs = figures.get("theirs", {})
    lines = lines_of(theirs, figures["ours"], args.all)
    if args.json:
        result = {
            "machine": taken_on,
            "runs": args.runs,
            "least_share_of_core": share,
            "figures": figures,
            "ratios": {row.name: row.ratio for row in lines},
            "targets": {row.name: row.target for row in lines if row.target is not None},
            "reached": {row.name: row.reached for row in lines if row.target is not None},
            "lines": [asdict(row) for row in lines],
        }
        print(json.dumps(result))
    else:
        print_table(lines, taken_on, args.runs)
    if share < QUIET:
        print(
            f"others used this core: a part had {share:.0%} of it. Take the figures again when it is quiet.",
            file=sys.stderr,
        )
    return 1 if any(row.reached is False for row in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
