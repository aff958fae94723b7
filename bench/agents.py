#!/usr/bin/env python
"""Recorded sessions of coding agents on every cache, one table: hit rate, saved compute, time to the first token.

    python bench/agents.py SESSIONS                       # a folder, or a packed file, as `hybrid doctor` reads them
    python bench/agents.py SESSIONS --models 9B --gib 16 32 64 --engines hybrid lru vllm sglang
    python bench/agents.py SESSIONS --draw 60 --seed 3    # 60 sessions of a folder, drawn by a seed
    python bench/agents.py SESSIONS --users 20            # closed loop: 20 sessions at a time

Requests come one at a time in order of arrival (a session begins every 240 s on average, pauses are cut to 30 minutes),
or with `--users` in a closed loop. Engines are those of `hybrid doctor`; `vllm` and `sglang` are their own schedulers
where `make vllm` and `make sglang` have installed them (`--vllm-python`, `--sglang-python`), else, or with `--modeled`,
models of them. Each cell is a process of its own. A cell reads: hit rate in % (saved compute in %) seconds to the first
token, 90 % / CPU seconds of the replay.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, arguments, machine, print_table, printed

MODELS = {"9B": (32768, 51511296, 8, 24, 140_000), "35B-A3B": (20480, 64389120, 10, 30, 37_000)}
"""Of Qwen3.5 in bfloat16: bytes per token and of a state, layers of attention and of states, and the crossover."""

GIB = {"9B": (8, 16, 24, 32, 48, 64, 96), "35B-A3B": (8, 12, 24, 48, 64, 96)}
ENGINES = ("hybrid", "lru", "marconi", "vllm", "sglang")
RATE = 60_000.0
"""Tokens of prompts per second: of a request alone on one large GPU, about."""


def drawn(folder: Path, count: int, seed: int) -> list[Path]:
    """Sessions of a folder, by a seed: those that have 8 to 400 requests."""
    files = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(files)
    found: list[Path] = []
    for file in files:
        if len(found) == count:
            break
        value = json.loads(file.read_bytes())
        if 8 <= sum(len(one.get("requests", "x")) for one in value["requests"]) <= 400:
            found.append(file)
    return found


def replay_one(
    paths: list[Path], model: str, gib: float, engine: str, users: int | None, modeled: bool = False
) -> dict[str, Any]:
    """One cell: figures, and the CPU seconds that they took."""
    from hybrid.doctor import Sizes, Traffic, replay

    *sizes, crossover = MODELS[model]
    traffic = Traffic.read(paths)
    start = time.process_time()
    pace: dict[str, int] = {"concurrency": 1} if users is None else {"users": users}
    given = {"causes": False, "prefill_rate": RATE, "models": modeled, **pace}
    (row,) = replay(traffic, Sizes(*sizes, crossover=crossover), engine, int(gib * 2**30), **given).rows
    return {
        "hit_rate": row.hit_rate,
        "saved_compute": row.saved_compute,
        "first_token": row.first_token,
        "cpu_seconds": time.process_time() - start,
        "scheduler": row.scheduler,
        "requests": traffic.num_requests,
        "tokens": traffic.num_prompt_tokens,
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("sessions", type=Path, help="recorded sessions")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--gib", nargs="+", type=float, help="memory (default: 8 to 96 GiB)")
    parser.add_argument(
        "--engines", nargs="+", default=ENGINES, help=f"of hybrid doctor (default: {' '.join(ENGINES)})"
    )
    parser.add_argument(
        "--modeled", action="store_true", help="models of vllm and sglang also where these are installed"
    )
    parser.add_argument("--users", type=int, help="sessions at a time, in a closed loop")
    parser.add_argument("--draw", type=int, help="as many sessions of a folder")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    for name in ("vllm", "sglang"):
        where = ROOT / f".venv-{name}" / "bin" / "python"
        parser.add_argument(f"--{name}-python", default=where, help=f"an interpreter with it (default: {where.parent})")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "GIB", "ENGINE"), help="one cell, printed as JSON")
    args = parser.parse_args()
    paths = drawn(args.sessions, args.draw, args.seed) if args.draw else [args.sessions]
    if args.one:
        model, gib, engine = args.one
        print(json.dumps(replay_one(paths, model, float(gib), engine, args.users, args.modeled)))
        return 0
    shared = ["--users", args.users] if args.users else []
    shared += ["--modeled"] if args.modeled else []
    shared += ["--draw", args.draw, "--seed", args.seed] if args.draw else []
    found: dict[str, Any] = {}
    for model in args.models:
        sizes = args.gib or GIB[model]
        rows = []
        for engine in args.engines:
            cells = []
            for gib in sizes:
                own = {"vllm": args.vllm_python, "sglang": args.sglang_python}.get(engine, sys.executable)
                python = own if Path(own).exists() else sys.executable
                command = [python, "-W", "ignore", __file__, args.sessions, *shared, "--one", model, gib, engine]
                one = found[f"{model} {gib:g} {engine}"] = printed(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
                late, cpu = one["first_token"]["p90"], one["cpu_seconds"]
                cells.append(f"{one['hit_rate']:.1f} ({one['saved_compute']:.1f}) {late:.1f} s / {cpu:.0f}")
                print(f"{model}, {gib:g} GiB, {engine} on {one['scheduler']}: {cells[-1]}", file=sys.stderr, flush=True)
            rows.append([engine, *cells])
        if not args.json:
            print_table([model, *(f"{gib:g} GiB" for gib in sizes)], rows, [machine()])
    if args.json:
        print(json.dumps({"machine": machine(), "cells": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
