#!/usr/bin/env python
"""Schedulers of vLLM and SGLang on traces, without a model: hits next to those of `hybrid doctor`'s models of them.

    python bench/doctor.py --record hits.json --engine vllm lmsys:3 lmsys:6    # in an environment with vLLM 0.33
    python bench/doctor.py --record hits.json --engine sglang fewshot@104:4    # with SGLang 0.5.23, after make sglang
    python bench/doctor.py --check hits.json                                   # in this package's: compares them
    python bench/doctor.py --cost 100000                                       # how long replays take

A cell is a trace of `bench/traces.py`, a seed if it is not the trace's own, and gigabytes (1e9 bytes). The first two
write the cached tokens of each request; the third replays them and exits with status 1 where hit rates are more than
half a point apart. Of vLLM blocks of 528 tokens and one token of an answer a step, of SGLang pages of 64 tokens and its
Rust core; layers as those of a Qwen3.5-4B. `--first N` takes the first requests of each trace alone. `--cost` replays
hashes of many chats, about 4,000 tokens a prompt, with 24 GiB, and says how many seconds of CPU each engine took and
how much memory at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from common import ROOT
from traces import make

SIZES = 32768, 51511296
PART = 8192


def serve_vllm(gigabytes: float, requests: list[dict[str, Any]]) -> Iterator[int]:
    """The hits of vLLM's scheduler."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.vllm_served import Served

    served = Served(gigabytes * 1e9, None, token_by_token=True)
    for one in requests:
        before = served.hit_tokens
        served.serve([(one["input_tokens"], one["output_tokens"])])
        yield served.hit_tokens - before


def serve_sglang(gigabytes: float, requests: list[dict[str, Any]]) -> Iterator[int]:
    """The hits of SGLang's cache, on its own pools and requests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.sglang_absent import imitate

    imitate()
    from support.sglang_served import Served, Setting, budget

    served = Served(Setting("rust", "lru", *budget(gigabytes, 64)))
    for one in requests:
        ids = array("q", one["input_tokens"] + one["output_tokens"])
        yield served.serve(ids, len(one["input_tokens"]), PART)


ENGINES: dict[str, Callable[[float, list[dict[str, Any]]], Iterator[int]]] = {
    "vllm": serve_vllm,
    "sglang": serve_sglang,
}


def trace_of(cell: str, first: int | None) -> tuple[float, list[dict[str, Any]]]:
    """The memory and the requests of a cell such as "lmsys@102:3"."""
    named, gigabytes = cell.split(":")
    name, _, seed = named.partition("@")
    return float(gigabytes), make(name, int(seed) if seed else None)[:first]


def record(args: argparse.Namespace) -> int:
    """Write the hits of an engine."""
    cells = {}
    for cell in args.cells:
        start = time.perf_counter()
        cells[cell] = list(ENGINES[args.engine](*trace_of(cell, args.first)))
        print(f"{args.engine}, {cell}: {sum(cells[cell])} tokens hit, {time.perf_counter() - start:.0f} s", flush=True)
    args.record.write_text(json.dumps({"engine": args.engine, "first": args.first, "hits": cells}) + "\n")
    return 0


def check(path: Path) -> int:
    """Compare recorded hits with those of a model. Returns 1 where rates are more than half a point apart."""
    from hybrid.doctor import Sizes
    from hybrid.doctor.engines import engine_of
    from hybrid.doctor.request import LoggedRequest, hashed

    recorded, worst = json.loads(path.read_text()), 0.0
    for cell, theirs in recorded["hits"].items():
        gigabytes, requests = trace_of(cell, recorded["first"])
        engine, ours = engine_of(recorded["engine"], Sizes(*SIZES), int(gigabytes * 1e9)), []
        for one in requests:
            ids = one["input_tokens"] + one["output_tokens"]
            ours.append(engine.serve(LoggedRequest(hashed(ids), len(one["input_tokens"]), len(ids))).num_tokens)
        total = sum(len(one["input_tokens"]) for one in requests)
        rates = [100 * sum(hits) / total for hits in (theirs, ours)]
        different = sum(a != b for a, b in zip(theirs, ours, strict=True))
        worst = max(worst, abs(rates[0] - rates[1]))
        print(f"{recorded['engine']}, {cell}: {rates[0]:.2f} %, the model {rates[1]:.2f} %; {different} of {len(ours)}")
    return int(worst > 0.5)


def chats() -> Iterator[dict[str, Any]]:
    """Requests of two sets of short chats and one of long ones at a time, then of others alike, without end."""
    for seed in count(1000):  # away from the seeds of other cells
        made = [(name, one) for name in ("lmsys", "sharegpt") for one in make(name, seed)]
        made += [("more", one) for one in make("lmsys", seed + 1000)]
        yield from (one for _, one in sorted(made, key=lambda each: (each[1]["ts"], each[0], each[1]["session_id"])))


def cost(num_requests: int, engines: list[str]) -> int:
    """Print how long replays of many requests take, in CPU time."""
    gc.disable()  # as `replay` does
    from hybrid.doctor import Sizes
    from hybrid.doctor.engines import engine_of
    from hybrid.doctor.request import hashed
    from hybrid.doctor.traffic import Traffic

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for one in islice(chats(), num_requests):
            hashes = hashed(one["input_tokens"] + one["output_tokens"]).tobytes().hex()
            lengths = {"prompt_tokens": one["num_input_tokens"]}
            lengths["tokens"] = one["num_input_tokens"] + one["num_output_tokens"]
            file.write(json.dumps({**lengths, "hashes": hashes}) + "\n")
        file.flush()
        traffic = Traffic.read(file.name)
    tokens = traffic.num_prompt_tokens / traffic.num_requests
    print(f"{traffic.num_requests} requests of {tokens:.0f} tokens, read in {traffic.seconds:.0f} s", flush=True)
    for name in engines:
        engine = engine_of(name, Sizes(*SIZES), 24 << 30)
        start, hits = time.process_time(), sum(engine.serve(request).num_tokens for request, _ in traffic)
        seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rate = 100 * hits / traffic.num_prompt_tokens
        print(f"{name}: {seconds:.1f} s, {rate:.1f} % hit, peak of memory {peak:.0f} MiB", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="TRACE[@SEED]:GB")
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--first", type=int, help="requests of each trace (default: all)")
    parser.add_argument("--record", type=Path, help="write the hits of the engine's own scheduler")
    parser.add_argument("--check", type=Path, help="compare the models with these hits")
    parser.add_argument("--cost", type=int, metavar="REQUESTS", help="time replays of so many requests")
    args = parser.parse_args()
    if args.cost is not None:
        return cost(args.cost, ["sglang", "vllm", "lru", "marconi", "hybrid"])
    if args.check is not None:
        return check(args.check)
    if args.record is None or not args.cells:
        parser.error("give --check FILE, or --record FILE and cells")
    return record(args)


if __name__ == "__main__":
    sys.exit(main())
