#!/usr/bin/env python
"""How many tokens a cache saves: a trace of requests through the real bookkeeping, without tensors.

    python bench/hit_rate.py --trace lmsys --geometry qwen35_4b --budget-gb 3
    python bench/hit_rate.py --trace my.jsonl --geometry 65536,1000000 --budget-gb 1
    python bench/hit_rate.py --reference bench/reference.json --traces DIR --policy lhd     # DIR: bench/traces.py
    python bench/hit_rate.py --adversarial --against lru

A trace is a file of JSON lines, one request each, with `input_tokens` and `output_tokens` (lists of token ids), in
order of arrival; or a folder or a packed file of recorded sessions, as `hybrid doctor` reads them, with `--users N` as
many at a time in a closed loop: a request is served when it comes, and its answer takes what `--prefill-rate` and 50
tokens per second say. With `--crossover` saved compute and times to the first token are given too. `--traces DIR` (or
HYBRID_TRACES) is where traces are found by name. Requests run one after another; a request's hit is the part that need
not be computed again, at most its length - 1; afterwards its input and output are in the cache. `--budget-gb inf` never
runs out. `--reference` runs every cell of a file of known figures, `--adversarial` traces that are made against
policies that learn. With `--against lru` each cell is run with that policy too, and its hit rate less half a point is
the target. The value of a line is the token hit rate in percent. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import traces
from common import ROOT, Line, arguments, finish
from tqdm import tqdm

from hybrid import CacheConfig, CacheMemory, HybridCache, HybridError, Policy
from hybrid.cache.config import DEFAULT_PLACEMENT
from hybrid.checks import STATE_DTYPE_NAMES
from hybrid.doctor.arrivals import DECODE_RATE, PREFILL_RATE, ClosedLoop
from hybrid.doctor.sessions import SessionLog, is_session
from hybrid.doctor.sizes import Sizes
from hybrid.key import Key
from hybrid.tiers.disk import MAX_SEGMENT_BYTES, READ
from hybrid.tiers.host import COPY
from hybrid.tree.node import Kind
from hybrid.tree.policies import POLICIES

GEOMETRIES = {
    name: (sizes["kv_bytes_per_token"], sizes["state_bytes"])
    for name, sizes in json.loads((ROOT / "bench" / "reference.json").read_text(encoding="utf-8"))["geometries"].items()
}
"""Bytes of KV per token, and of a state: what `--geometry` takes too, as two numbers."""

STORED_SHARE = {"float32": None, "bfloat16": 0.512, "int8": 0.275}
"""Bytes of a stored checkpoint over those of a state, as with the Qwen3.5-4B shape."""

PAGE = 64

COMPUTED = (8000, 1.0)  # tokens, and the seconds that computing them takes: what a restore must beat

DISK_SCALE = 64  # with a disk all sizes are divided by this, and seconds per byte multiplied: its files are real

KNOWN = {"lru": "LRU", "marconi": "Marconi", "marconi_best_alpha": "best alpha", "learned": "simulated"}
KNOWN_INFINITE = {"any_token": "any token", "checkpoint_every_64": "every 64"}
"""Names of the known figures in tables."""

Request = tuple[array, int]
"""Token ids of input and output, and how many of them are input."""


class SessionTrace(Sequence[Request]):
    """The requests of recorded sessions in order of arrival; each is made when it is asked for."""

    def __init__(self, log: SessionLog) -> None:
        self.log = log

    def __len__(self) -> int:
        return len(self.log.requests)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        request = self.log.requests[number]
        return self.log.token_ids(request), request.num_prompt


def load_trace(name: str, folder: Path | None) -> Sequence[Request]:
    """The requests of a trace, by file or by name."""
    path = Path(name)
    if path.exists() and is_session(path):
        return SessionTrace(SessionLog.read([path]))
    if not path.is_file():
        if folder is None:
            sys.exit(f"{name!r} is not a file; give --traces DIR (or HYBRID_TRACES) with a {name}.jsonl in it")
        path = folder / f"{name}.jsonl"
    if not path.is_file():
        sys.exit(f"no trace {path.name} in {folder}; python bench/traces.py --out {folder} makes it, or give a file")
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(tqdm(file, desc=f"reading {path.name}", unit="request", disable=None), 1):
            try:
                fields = json.loads(line)
                ids = array("i", fields["input_tokens"])
                requests.append((ids + array("i", fields["output_tokens"]), len(ids)))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                sys.exit(f"{path}, line {number}: not a request with input_tokens and output_tokens ({error!r})")
    return requests


def serve(cache: HybridCache, key: Key, num_input: int, num_whole: int | None = None) -> tuple[int, int]:
    """Serve one request from its prompt to its last token, as the engine does.

    Args:
        key: of its prompt and its answer.
        num_input: tokens of the prompt.
        num_whole: tokens of the key that are whole; None: all.

    Returns:
        Its usable hit and its page hit, 0 when it could not have its memory.
    """
    grid, names, length = cache.config.grid, cache.config.placement, len(key)
    lease = cache.open(key, num_input - 1, num_input)
    if lease is None:
        return 0, 0
    hit, pages = lease.num_hit_tokens, lease.explanation.page_hit
    cache.capture_along(lease, num_input, num_input)
    cache.advance(lease, num_input)
    cache.commit(lease, key, num_input // grid * grid)
    if cache.reserve(lease, length):
        whole = (length if num_whole is None else num_whole) // grid * grid
        if "turn_end" in names and whole > num_input:
            cache.capture(lease, whole, Kind.TURN_END)
        cache.advance(lease, length)
        cache.commit(lease, key, whole)
        if "turn_end" in names:
            cache.end_turn(lease, length)
    cache.close(lease)
    return hit, pages


class NoContents:
    """Pages and checkpoints of the right sizes without contents: nothing is stored, moved or restored, and what host
    memory copies is zeros."""

    def __init__(self, page_bytes: int, checkpoint_bytes: int) -> None:
        self.checkpoint_bytes = checkpoint_bytes
        self._page, self._checkpoint = memoryview(bytes(page_bytes)), memoryview(bytes(checkpoint_bytes))

    def _nothing(self, *args: Any) -> None: ...

    store = restore = move_pages = move_states = move_stored = write_page = write_checkpoint = _nothing

    def page_layout(self) -> str:
        return ""

    checkpoint_layout = page_layout

    def read_page(self, page: int) -> memoryview:
        return self._page

    def read_checkpoint(self, slot: int) -> memoryview:
        return self._checkpoint


def policy_of(name: str) -> str | Policy:
    """What `CacheConfig.eviction` is given: a name of `POLICIES` with its options, or an object of a class of one's
    own, `module:Class`, which the module's folder or the current one has."""
    module, colon, its_name = name.partition(":")
    if not colon or module in POLICIES:
        return name
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return getattr(import_module(module), its_name)()
    except (ImportError, AttributeError, TypeError) as error:
        sys.exit(f"--policy {name}: a class {its_name!r} in a module {module!r} cannot be made: {error}")


def cache_of(args: argparse.Namespace, geometry: str, budget_gb: float, folder: str) -> HybridCache:
    """The cache that a trace is run on. `folder`: for its disk."""
    config = CacheConfig(
        page_size=PAGE,
        chunk_size=PAGE,
        eviction=policy_of(args.policy),
        placement=args.placement,
        state_dtype=args.state_dtype,
        seed=args.seed,
    )
    if math.isinf(budget_gb):
        return HybridCache(CacheMemory.of_indices(1 << 21, 1 << 19), config)
    kv_bytes, state_bytes = GEOMETRIES.get(geometry) or map(int, geometry.split(","))
    scale = DISK_SCALE if args.disk else 1
    share, budget, page_bytes = STORED_SHARE[args.state_dtype], int(budget_gb * 1e9) // scale, PAGE * kv_bytes // scale
    contents = NoContents(page_bytes, int((share or 1) * state_bytes) // scale)
    stored, copied = contents if share else None, contents if args.host or args.disk else None
    memory = CacheMemory.of_bytes(budget, page_bytes, state_bytes // scale, mover=copied, store=stored)
    host, disk = int(args.host * budget) or None, int(args.disk * budget) or None
    if copied is None:
        return HybridCache(memory, config)
    with (
        patch("hybrid.cache.tiers.free_memory", lambda device: 1 << 60),  # nothing is copied
        patch("hybrid.tiers.host.COPY", COPY * scale),
        patch("hybrid.tiers.disk.READ", READ * scale),
        patch("hybrid.tiers.disk.MAX_SEGMENT_BYTES", MAX_SEGMENT_BYTES // scale),
    ):
        config = replace(config, host=host, disk=disk, directory=folder if disk else None)
        cache = HybridCache(memory, config, model=geometry)
    cache.note_pass(*COMPUTED)
    if cache.tiers is not None and cache.tiers.disk is not None:
        cache.tiers.disk.be_patient(1e6)  # requests come faster than they would
    return cache


class Order:
    """The numbers of requests in order: as they are, or of recorded sessions in a closed loop.

    Args:
        requests: of a trace.
        users: sessions at a time; None: as they are.
    """

    def __init__(self, requests: Sequence[Request], users: int | None) -> None:
        self._count = len(requests)
        self._loop: ClosedLoop | None = None
        self._ends: list[tuple[float, int]] = []  # of requests that are served
        self._now = 0.0
        if users is not None:
            if not isinstance(requests, SessionTrace):
                sys.exit("--users N replays recorded sessions, and this trace is none; leave it out")
            self._loop = ClosedLoop([one.turn for one in requests.log.requests], users)

    def __iter__(self) -> Iterator[int]:
        if self._loop is None:
            yield from range(self._count)
            return
        due = self._loop.due
        while due or self._ends:
            if self._ends and (not due or self._ends[0] <= due[0]):
                time, number = heappop(self._ends)
                self._loop.ended(number, time)
            else:
                self._now, number = heappop(due)
                yield number

    def serve(self, number: int, seconds: float) -> None:
        """A request that has come takes that long."""
        if self._loop is not None:
            heappush(self._ends, (self._now + seconds, number))


@patch("hybrid.tiers.cost.Cost.note", lambda *args: None)  # nothing is copied: it takes as long as is assumed
def run(
    args: argparse.Namespace,
    name: str,
    requests: Sequence[Request],
    geometry: str,
    budget_gb: float,
    target: float | None = None,
    known: dict[str, float] | None = None,
) -> Line:
    """Run a trace through the bookkeeping. `known`: what others have there, in percent."""
    folder, hits, spent, computed = TemporaryDirectory(), 0, 0.0, array("l")
    sizes, saved, whole = Sizes(1, 0, crossover=args.crossover), 0.0, 0.0
    cache = cache_of(args, geometry, budget_gb, folder.name)
    title = f"{name}, endless memory" if math.isinf(budget_gb) else f"{name}, {budget_gb:g} GB"
    order = Order(requests, args.users)
    for number in tqdm(order, desc=title, total=len(requests), unit="request", disable=None, leave=False):
        ids, num_input = requests[number]
        start = time.perf_counter()
        hit = serve(cache, Key.of(ids), num_input)[0]
        spent += time.perf_counter() - start
        hits, saved, whole = hits + hit, saved + sizes.cost(hit), whole + sizes.cost(num_input)
        computed.append(num_input - hit)
        order.serve(number, (num_input - hit) / args.prefill_rate + (len(ids) - num_input) / DECODE_RATE)
        if args.audit:
            cache.audit()
    stats = cache.stats()
    hit_rate = round(100 * hits / max(hits + sum(computed), 1), 2)
    evicted = {what: getattr(stats, what) for what in ("evicted_checkpoints", "evicted_pages", "moved_pages")}
    offered = max(1, stats.host_bytes_offered or stats.disk_bytes_offered)
    for where in ("host", "disk"):
        if getattr(args, where):
            evicted[f"{where}_written_per_evicted"] = round(getattr(stats, f"{where}_bytes_written") / offered, 3)
    if args.disk:
        evicted["late"] = cache.tiers.disk.counts.num_late
        cache.tiers.disk.close()
    folder.cleanup()
    micros = round(1e6 * spent / max(len(requests), 1), 1)
    details = {"requests": len(requests), "us_per_request": micros, **evicted}
    if args.crossover is not None:
        waits = sorted(computed)
        middle = {"mean": sum(waits) / len(waits), "p50": waits[len(waits) // 2], "p90": waits[len(waits) * 9 // 10]}
        details["saved_compute"] = round(100 * saved / whole, 2)
        details["first_token_s"] = {name: round(tokens / args.prefill_rate, 3) for name, tokens in middle.items()}
    return Line(title, hit_rate, target, part=geometry, medians={**(known or {})}, unit="%", details=details)


def run_reference(args: argparse.Namespace) -> list[Line]:
    """Every cell of a file of known figures."""
    reference = json.loads(args.reference.read_text(encoding="utf-8"))
    names = args.trace.split(",") if args.trace else None
    cells = []
    for row in reference["cells"]:
        if args.geometry in ("all", row["geometry"]) and (names is None or row["trace"] in names):
            known = {title: row[key] for key, title in KNOWN.items() if key in row}
            best = max(row.get(key, 0.0) for key in ("lru", "marconi", "marconi_best_alpha"))
            target = max(best - 3, row.get("target", 0.0))
            cells.append((row["trace"], row["geometry"], row["budget_gb"], target, known))
    for name, row in reference["infinite_cache"].items() if names is None else ():
        known = {title: row[key] for key, title in KNOWN_INFINITE.items()}
        cells.append((name, "qwen35_4b", math.inf, row["checkpoint_every_64"] - 0.5, known))
    read = {name: load_trace(name, args.traces) for name, *_ in cells}
    return [run_cell(args, name, read[name], *sizes, round(target, 1), known) for name, *sizes, target, known in cells]


def run_adversarial(args: argparse.Namespace) -> list[Line]:
    """The traces that are made against policies that learn."""
    lines = []
    for name in traces.ADVERSARIAL:
        made = traces.make(name)
        requests = [(array("i", one["input_tokens"] + one["output_tokens"]), one["num_input_tokens"]) for one in made]
        lines.append(run_cell(args, name, requests, args.geometry, traces.MEMORY))
    return lines


def run_cell(
    args: argparse.Namespace, name: str, requests: Sequence[Request], geometry: str, budget_gb: float, *more: Any
) -> Line:
    """Run a trace; with `--against` by that policy before, which makes the target."""
    if args.against is None:
        return run(args, name, requests, geometry, budget_gb, *more)
    other = argparse.Namespace(**{**vars(args), "policy": args.against})
    hit_rate = run(other, name, requests, geometry, budget_gb).value
    return run(args, name, requests, geometry, budget_gb, round(hit_rate - 0.5, 2), {args.against: hit_rate})


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--trace", help="a file, or a name in the folder of traces; with --reference: only these names")
    shapes = ", ".join(GEOMETRIES)
    parser.add_argument("--geometry", metavar="NAME", help=f"{shapes}, or bytes of KV per token,bytes of a state")
    parser.add_argument("--budget-gb", type=float, help="memory, 1 GB = 1e9 bytes; inf: never runs out")
    policies = (
        f"what is evicted first: {', '.join(POLICIES)}, with options as in flop_aware:alpha=0.5, or one of your own, "
        "as module:Class (default: lhd)"
    )
    parser.add_argument("--policy", default="lhd", help=policies)
    placements = ",".join(DEFAULT_PLACEMENT)
    parser.add_argument("--placement", default=placements, help=f"where checkpoints are put (default: {placements})")
    parser.add_argument(
        "--state-dtype", default="float32", choices=STATE_DTYPE_NAMES, help="how checkpoints are stored"
    )
    parser.add_argument("--host", type=float, default=0.0, help="host memory behind it, in multiples of the budget")
    parser.add_argument("--disk", type=float, default=0.0, help="a disk behind them, likewise")
    parser.add_argument("--seed", type=int, default=0, help="of the policy's random numbers (default: 0)")
    text = "tokens of context at which attention takes as much to compute as all else: saved compute is given too"
    parser.add_argument("--crossover", type=int, help=text)
    parser.add_argument("--users", type=int, help="of recorded sessions as many at a time, in a closed loop")
    text = f"tokens of prompts that are computed per second (default: {PREFILL_RATE:g})"
    parser.add_argument("--prefill-rate", type=float, default=PREFILL_RATE, help=text)
    parser.add_argument("--audit", action="store_true", help="audit the cache after every request (slow)")
    parser.add_argument("--reference", type=Path, help="a file of known figures: run all of its cells")
    text = "run traces that are made against policies that learn"
    parser.add_argument("--adversarial", action="store_true", help=text)
    text = "run each cell with this policy too: its hit rate less half a point is the target"
    parser.add_argument("--against", metavar="POLICY", help=text)
    where = os.environ.get("HYBRID_TRACES")
    parser.add_argument("--traces", type=Path, default=where, help="where traces are found (default: HYBRID_TRACES)")
    args = parser.parse_args(given)
    args.traces = Path(args.traces) if args.traces is not None else None
    args.geometry = args.geometry or ("all" if args.reference else "qwen35_4b")
    if args.geometry not in (*GEOMETRIES, "all") and not re.fullmatch(r"[1-9]\d*,[1-9]\d*", args.geometry):
        parser.error(f"--geometry must be one of {shapes}, or two numbers of bytes; got {args.geometry!r}")
    if args.reference is None and not args.adversarial:
        if args.trace is None or args.budget_gb is None or args.geometry == "all":
            parser.error("give --trace, --geometry and --budget-gb, or --reference, or --adversarial")
        if not args.budget_gb > 0:
            parser.error(f"--budget-gb must be a positive number, or inf; got {args.budget_gb}")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse(given)
    try:
        if args.reference is not None:
            lines = run_reference(args)
        elif args.adversarial:
            lines = run_adversarial(args)
        else:
            requests = load_trace(args.trace, args.traces)
            lines = [run_cell(args, Path(args.trace).stem, requests, args.geometry, args.budget_gb)]
    except HybridError as error:
        sys.exit(str(error))
    asked = {"policy": args.policy, "placement": args.placement, "state_dtype": args.state_dtype, "seed": args.seed}
    return finish(lines, args, **asked)


if __name__ == "__main__":
    sys.exit(main())
