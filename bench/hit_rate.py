#!/usr/bin/env python
"""How many tokens a cache spares: a trace of requests through the real bookkeeping, without tensors.

    python bench/hit_rate.py --trace lmsys --geometry qwen35_4b --budget-gb 3
    python bench/hit_rate.py --trace my.jsonl --geometry custom --page-bytes 65536 --state-bytes 1000000 --budget-gb 1
    python bench/hit_rate.py --reference shared/traces/reference.json --policy lhd

A trace is a file of JSON lines, one request each, with `input_tokens` and `output_tokens` (lists of token ids), in the
order in which they come. `--traces DIR` (or HYBRID_TRACES) is where traces are found by name. Requests run one after
another; a request's hit is what need not be computed again, at most its length - 1; afterwards its input and output are
in the cache. `--budget-gb inf` never runs out. `--reference` runs every cell of a file of known figures beside ours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hybrid import CacheConfig, CacheMemory, HybridCache, HybridError
from hybrid.cache import placement
from hybrid.cache.config import PLACEMENTS, STATE_DTYPES
from hybrid.key import Key
from hybrid.tree.policies import POLICIES
from hybrid.tree.policy import TURN_END
from hybrid.tree.tree import Tree

GEOMETRIES = {"qwen35_4b": (32768, 51_511_296), "nv7b": (65536, 26_787_840)}
"""Bytes of KV per token, and of a state."""

RECORD_SHARE = {"float32": None, "bfloat16": 0.512, "int8": 0.275}
"""What a stored checkpoint weighs, relative to a state: as the records of the Qwen3.5-4B shape do."""

INFINITE = 1 << 62
PAGE = 64

TARGETS = {
    ("lmsys", 3.0): 44.0,
    ("sharegpt", 4.0): 46.0,
    ("fewshot", 4.0): 67.0,
    ("swebench", 10.0): 41.0,
    ("swebench_nc", 15.0): 58.0,
}
"""Cells of the geometry qwen35_4b that the default policy is to reach. In others it may be 3 points below the best of
LRU and Marconi."""

Request = tuple[array, int]
"""Token ids of input and output, and how many of them are input."""


@dataclass
class Result:
    """What a run spared, in percent of all input tokens, and what it lost of what was once known.

    Attributes:
        hit: need not be computed.
        lost_evicted: pages or a checkpoint were there and have been evicted.
        lost_no_checkpoint: pages were there, and no checkpoint ever was.
        lost_alignment: beyond the last multiple of the grid.
        first_sight: never seen before.
        us_per_request: microseconds of bookkeeping per request.
    """

    trace: str
    geometry: str
    budget_gb: float
    policy: str
    placement: str
    state_dtype: str
    requests: int
    hit: float
    lost_evicted: float
    lost_no_checkpoint: float
    lost_alignment: float
    first_sight: float
    us_per_request: float
    evicted_checkpoints: int
    evicted_pages: int
    moved_pages: int


def load_trace(name: str, folder: Path | None) -> list[Request]:
    """The requests of a trace, by file or by name. A parsed copy is kept beside the file: parsing takes longer than a
    run."""
    path = Path(name)
    if not path.is_file():
        if folder is None:
            sys.exit(f"{name!r} is no file; give --traces DIR (or HYBRID_TRACES) with a {name}.jsonl in it")
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            sys.exit(f"no trace {path.name} in {folder}; generate it there, or give a file")
    parsed = path.with_suffix(".parsed")
    if parsed.is_file() and parsed.stat().st_mtime >= path.stat().st_mtime:
        with parsed.open("rb") as file:
            return pickle.load(file)
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(tqdm(file, desc=f"reading {path.name}", unit="request", disable=None), 1):
            try:
                fields = json.loads(line)
                ids = array("i", fields["input_tokens"])
                requests.append((ids + array("i", fields["output_tokens"]), len(ids)))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                sys.exit(f"{path}, line {number}: not a request with input_tokens and output_tokens ({error!r})")
    try:
        with parsed.open("wb") as file:
            pickle.dump(requests, file)
    except OSError:
        pass  # a folder that cannot be written: it is parsed again next time
    return requests


class Known:
    """What a cache that kept everything would know, to the token."""

    def __init__(self) -> None:
        self._tree = Tree(1, 1, POLICIES["lru"]())

    def tokens(self, key: Key, limit: int) -> int:
        return self._tree.peek(key, limit).num_page_tokens

    def add(self, key: Key) -> None:
        self._tree.insert(key, len(key), array("i", bytes(4 * len(key))))


@dataclass(frozen=True)
class NoStore:
    """Stored checkpoints of `checkpoint_bytes` bytes, without contents."""

    checkpoint_bytes: int

    def store(self, slot: int, place: int) -> None:
        pass

    def restore(self, place: int, slot: int) -> None:
        pass

    def move_stored(self, moves: dict[int, int]) -> None:
        pass


def make_cache(args: argparse.Namespace, budget_gb: float) -> HybridCache:
    page_bytes, state_bytes = PAGE * args.kv_bytes, args.state_bytes
    share = RECORD_SHARE[args.state_dtype]
    config = CacheConfig(
        page_size=PAGE,
        chunk_size=PAGE,
        eviction=args.policy,
        placement=args.placement,
        state_dtype=args.state_dtype,
        seed=args.seed,
    )
    if math.isinf(budget_gb):
        return HybridCache(CacheMemory.of_indices(1 << 21, 1 << 19), config)
    store = None if share is None else NoStore(int(share * state_bytes))
    memory = CacheMemory.of_bytes(int(budget_gb * 1e9), page_bytes, state_bytes, store=store)
    return HybridCache(memory, config)


def serve(cache: HybridCache, request: Request) -> int:
    """One request from its prompt to its last token; returns its usable hit, 0 when it could not have its memory."""
    ids, num_input = request
    key, grid, names = Key.of(ids), cache.config.grid, cache.config.placement
    limit = num_input - 1
    lease = cache.open(key, limit, num_input)
    if lease is None:
        return 0
    hit = lease.num_hit_tokens
    wanted = placement.of_prompt(
        names, num_input, grid, branching_len=lease.branching_len, shared=(), declared=(), is_replay=False
    )
    for position, kind in wanted.items():
        if position > hit:
            cache.capture(lease, position, kind)
    if "geometric" in names:
        for position in placement.spare(hit, num_input, grid, cache.spare_share):
            if position not in wanted and cache.capture_spare(lease, position) is None:
                break
    cache.advance(lease, num_input)
    cache.commit(lease, key, num_input // grid * grid)
    if cache.reserve(lease, len(ids)):
        whole = len(ids) // grid * grid
        if "turn_end" in names and whole > num_input:
            cache.capture(lease, whole, TURN_END)
        cache.advance(lease, len(ids))
        cache.commit(lease, key, whole)
        if "turn_end" in names:
            cache.end_turn(lease, len(ids))
    cache.close(lease)
    return hit


def run(args: argparse.Namespace, name: str, requests: Sequence[Request], budget_gb: float) -> Result:
    """Drive the bookkeeping through a trace."""
    cache, known = make_cache(args, budget_gb), Known()
    asked = hits = evicted = missing = unaligned = new = 0
    spent = 0.0
    for request in tqdm(requests, desc=f"{name} {budget_gb:g} GB", unit="request", disable=None, leave=False):
        ids, num_input = request
        key = Key.of(ids)
        limit = num_input - 1
        found = cache.tree.peek(key, limit)
        pages, lost = found.num_page_tokens, cache.tree.lost_checkpoint(found) is not None
        start = time.perf_counter()
        hit = serve(cache, request)
        spent += time.perf_counter() - start
        seen = known.tokens(key, limit)
        known.add(key)
        whole = seen // cache.config.grid * cache.config.grid
        asked += num_input
        hits += hit
        evicted += max(0, whole - max(pages, hit)) + (pages - hit if lost and pages > hit else 0)
        missing += pages - hit if not lost and pages > hit else 0
        unaligned += seen - whole
        new += num_input - seen
        if args.audit:
            cache.audit()
    stats = cache.stats()

    def percent(tokens: int) -> float:
        return round(100 * tokens / max(asked, 1), 2)

    return Result(
        name,
        args.geometry,
        budget_gb,
        args.policy,
        ",".join(cache.config.placement),
        args.state_dtype,
        len(requests),
        percent(hits),
        percent(evicted),
        percent(missing),
        percent(unaligned),
        percent(new),
        round(1e6 * spent / max(len(requests), 1), 1),
        stats.evicted_checkpoints,
        stats.evicted_pages,
        stats.moved_pages,
    )


def run_reference(args: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Every cell of a file of known figures, ours beside them."""
    reference = json.loads(path.read_text(encoding="utf-8"))
    traces: dict[str, list[Request]] = {}
    rows = []
    cells = [cell for cell in reference["cells"] if args.geometry in ("all", cell["geometry"])]
    if args.trace:
        cells = [cell for cell in cells if cell["trace"] in args.trace.split(",")]
    infinite = reference["infinite_cache"] if not args.trace or args.infinite else {}
    for cell in cells:
        args.geometry = cell["geometry"]
        args.kv_bytes, args.state_bytes = GEOMETRIES[cell["geometry"]]
        name = cell["trace"]
        if name not in traces:
            traces[name] = load_trace(name, args.traces)
        result = run(args, name, traces[name], cell["budget_gb"])
        best = max(cell.get(key, 0.0) for key in ("lru", "marconi", "marconi_best_alpha"))
        target = best - 3
        if cell["geometry"] == "qwen35_4b":
            target = max(target, TARGETS.get((name, cell["budget_gb"]), 0.0))
        rows.append({**asdict(result), **cell, "target": round(target, 1), "reached": result.hit >= target})
    for name, figures in infinite.items():
        if name not in traces:
            traces[name] = load_trace(name, args.traces)
        result = run(args, name, traces[name], math.inf)
        target = round(figures["checkpoint_every_64"] - 0.5, 1)
        rows.append({**asdict(result), **figures, "target": target, "reached": result.hit >= target})
    return rows


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("", "geometry", "trace", "GB", "LRU", "Marconi", "best alpha", "learned", "ours", "target")
    for column in ("evicted", "no checkpoint", "alignment", "us/request"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row.get(name) for name in ("lru", "marconi", "marconi_best_alpha", "learned")]
        if math.isinf(row["budget_gb"]):
            cells = ["any token", row["any_token"], "every 64", row["checkpoint_every_64"]]
        table.add_row(
            "ok" if row["reached"] else "MISS",
            row["geometry"] if not math.isinf(row["budget_gb"]) else "",
            row["trace"],
            f"{row['budget_gb']:g}",
            *("" if cell is None else str(cell) for cell in cells),
            f"{row['hit']:.1f}",
            f">= {row['target']}",
            f"{row['lost_evicted']:.1f}",
            f"{row['lost_no_checkpoint']:.1f}",
            f"{row['lost_alignment']:.1f}",
            f"{row['us_per_request']:.0f}",
        )
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a file, or a name in the folder of traces; with --reference: only these names")
    parser.add_argument(
        "--geometry", default=None, choices=[*GEOMETRIES, "custom", "all"], help="sizes of pages and states"
    )
    parser.add_argument("--kv-bytes", type=int, help="custom: bytes of KV per token")
    parser.add_argument("--state-bytes", type=int, help="custom: bytes of a state")
    parser.add_argument("--budget-gb", type=float, help="memory, 1 GB = 1e9 bytes; inf: never runs out")
    parser.add_argument("--policy", default="lhd", choices=list(POLICIES), help="what goes first (default: lhd)")
    parser.add_argument(
        "--placement", default=",".join(PLACEMENTS), help=f"where checkpoints are put (default: {','.join(PLACEMENTS)})"
    )
    parser.add_argument("--state-dtype", default="float32", choices=STATE_DTYPES, help="how checkpoints are stored")
    parser.add_argument("--seed", type=int, default=0, help="of the policy's dice (default: 0)")
    parser.add_argument("--audit", action="store_true", help="prove the books after every request (slow)")
    parser.add_argument("--reference", type=Path, help="a file of known figures: run all of its cells")
    parser.add_argument("--infinite", action="store_true", help="with --reference and --trace: the endless memory too")
    parser.add_argument(
        "--traces",
        type=Path,
        default=os.environ.get("HYBRID_TRACES"),
        help="where traces are found by name (default: HYBRID_TRACES)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args(arguments)
    args.traces = Path(args.traces) if args.traces is not None else None
    args.geometry = args.geometry or ("all" if args.reference else "qwen35_4b")
    if args.reference is None:
        if args.trace is None or args.budget_gb is None or args.geometry == "all":
            parser.error("give --trace, --geometry and --budget-gb, or --reference")
        if not args.budget_gb > 0:
            parser.error(f"--budget-gb must be a positive number, or inf; got {args.budget_gb}")
        if args.geometry != "custom":
            args.kv_bytes, args.state_bytes = GEOMETRIES[args.geometry]
        elif not args.kv_bytes or not args.state_bytes:
            parser.error("--geometry custom needs --kv-bytes and --state-bytes")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        if args.reference is not None:
            rows = run_reference(args, args.reference)
        else:
            result = run(args, Path(args.trace).stem, load_trace(args.trace, args.traces), args.budget_gb)
            rows = [asdict(result)]
    except HybridError as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps(rows if args.reference is not None else rows[0]))
    elif args.reference is not None:
        show(rows, console)
    else:
        for name, value in rows[0].items():
            console.print(f"{name:>20}  {value}", highlight=False)
    return 0 if all(row.get("reached", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
