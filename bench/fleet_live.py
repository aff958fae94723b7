#!/usr/bin/env python
"""A fleet of the tiny model on a real Ray, asked by many clients at once under evictions: what is promised, and hit.

    python bench/fleet_live.py                                # 2 replicas, 16 clients, 400 requests
    python bench/fleet_live.py --replicas 4 --clients 32
    python bench/fleet_live.py --adapters 2 --host-memory 16MiB --shared-memory 64MiB

Needs the extra `ray` and httpx. Clients ask about documents, some more often than others, and half of the time ask
again where they were. Answers, with their log-probabilities, are compared with those of one engine in a process of its
own, bit by bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import ROOT, Line, arguments, check, finish

from hybrid import CacheConfig
from hybrid.commands.fleet import shared_directory
from hybrid.engine.config import EngineConfig
from hybrid.fleet import deployment
from hybrid.fleet.settings import FleetSettings
from hybrid.models.loading import TINY

ONE_ENGINE = """
import json, sys, hybrid, torch
torch.set_num_threads(1)
asked = json.load(sys.stdin)
with hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="256MiB")) as engine:
    for name, path in asked["adapters"].items():
        engine.adapters.load(name, path)
    found = []
    for prompt, adapter in asked["prompts"]:
        params = hybrid.SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1, adapter=adapter)
        one = engine.generate([prompt], params)[0]
        found.append([one.text, [row[token] for row, token in zip(one.logprobs, one.token_ids)]])
    print(json.dumps(found))
"""
"""A process of its own, as each replica is."""


@dataclass
class Asked:
    """A request.

    Attributes:
        prompt: its token ids.
        adapter: that it names; None: none.
        answer: its text and log-probabilities.
        hit: tokens.
        seconds: that it took.
    """

    prompt: list[int]
    adapter: str | None
    answer: list[Any]
    hit: int
    seconds: float


async def client(
    url: str, number: int, args: argparse.Namespace, documents: list[list[int]], names: list[Any]
) -> list[Asked]:
    """Ask, one request after the other."""
    rng, found = random.Random(1000 * args.seed + number), list[Asked]()
    weights = [1 / (at + 1) ** 0.7 for at in range(len(documents))]
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        num_sessions = 0
        for _ in range(args.requests // args.clients):
            if found and rng.random() < 0.5:
                prompt, adapter = found[-1].prompt + [rng.randrange(3, 1000) for _ in range(60)], found[-1].adapter
            else:
                num_sessions += 1
                document = rng.choices(documents, weights)[0]
                prompt, adapter = document + [rng.randrange(3, 1000) for _ in range(30)], rng.choice(names)
            body = {"model": adapter or "tiny", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
            if args.ids:
                body["prompt_cache_key"] = f"client {number}, {num_sessions}"
            start = time.perf_counter()
            answer = await http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise RuntimeError(answer.text)
            made = answer.json()
            choice = made["choices"][0]
            hit = made["usage"]["prompt_tokens_details"]["cached_tokens"]
            own = [choice["text"], choice["logprobs"]["token_logprobs"]]
            found.append(Asked(prompt, adapter, own, hit, time.perf_counter() - start))
            if args.pause:
                await asyncio.sleep(rng.expovariate(1 / args.pause))
    return found


async def ask(url: str, args: argparse.Namespace, documents: list[list[int]], names: list[Any]) -> list[Asked]:
    """All clients at once."""
    all_of = await asyncio.gather(*(client(url, number, args, documents, names) for number in range(args.clients)))
    return [one for found in all_of for one in found]


def adapters_in(folder: Path, count: int) -> dict[str, str]:
    """Make adapters of the tiny model."""
    sys.path.insert(0, str(ROOT / "tests"))
    from transformers import AutoModelForCausalLM

    from support.peft_adapters import make_adapter

    def make(at: int) -> str:
        return str(make_adapter(AutoModelForCausalLM.from_pretrained(TINY), folder / str(at), at))

    return {f"adapter{at}": make(at) for at in range(count)}


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16, help="that ask at once (default: 16)")
    parser.add_argument("--requests", type=int, default=400, help="of all clients (default: 400)")
    parser.add_argument("--documents", type=int, default=24, help="of 400 tokens (default: 24)")
    parser.add_argument("--memory", default="6MiB", help="of each replica (default: 6MiB, which holds about eight)")
    parser.add_argument("--host-memory", help="of each replica (default: none)")
    parser.add_argument("--shared-memory", help="of all replicas (default: none)")
    parser.add_argument("--adapters", type=int, default=0, help="(default: 0)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between requests of a client (default: 0)")
    parser.add_argument("--ids", action="store_true", help="requests name sessions")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(given)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, rng = f"http://127.0.0.1:{port}", random.Random(args.seed)
    documents = [[rng.randrange(3, 1000) for _ in range(400)] for _ in range(args.documents)]
    disk = {"disk": args.shared_memory, "directory": shared_directory()} if args.shared_memory else {}
    cache = CacheConfig(memory=args.memory, host=args.host_memory, **disk)
    with tempfile.TemporaryDirectory() as folder:
        adapters = adapters_in(Path(folder), args.adapters)
        deployment.connect(None, num_cpus=2)
        try:
            settings = FleetSettings(
                model="tiny",
                name="tiny",
                cache=cache,
                engine=EngineConfig(max_num_seqs=16, max_waiting=256),
                adapters=adapters,
                threads=1,
            )
            deployment.start(settings, args.replicas, "127.0.0.1", port, num_cpus=0.0)
            start = time.perf_counter()
            asked = asyncio.run(ask(url, args, documents, [None, *adapters]))
            wall = time.perf_counter() - start
            time.sleep(3)
            replicas = httpx.get(f"{url}/fleet", timeout=60).json()["replicas"]
            metrics = httpx.get(f"{url}/metrics", timeout=60).text
        finally:
            deployment.stop("tiny")
        content = json.dumps({"adapters": adapters, "prompts": [[one.prompt, one.adapter] for one in asked]})
        one = subprocess.run(
            [sys.executable, "-c", ONE_ENGINE], input=content, capture_output=True, text=True, check=True
        )
    differ = sum(found != asked.answer for found, asked in zip(json.loads(one.stdout), asked, strict=True))
    tokens = {
        name: sum(replica[f"{name}_tokens"] for replica in replicas)
        for name in ("asked", "hit", "promised", "broken", "misjudged")
    }
    shown = ("evicted_checkpoints", "restored_tokens")
    counts = [line for line in metrics.splitlines() if any(name in line for name in shown) and line[0] != "#"]
    details = tokens | {
        "replicas": replicas,
        "counts": counts,
        "requests": len(asked),
        "wall_s": round(wall, 1),
        "load": os.getloadavg()[0],
    }
    kept = 1 - tokens["broken"] / max(1, tokens["promised"])
    judged = 1 - tokens["misjudged"] / max(1, tokens["asked"])
    lines = [
        Line("promised tokens that were hit", round(100 * kept, 2), 99.0, unit="%", details=details),
        Line("tokens that were hit as expected, or computed as expected", round(100 * judged, 2), 99.0, unit="%"),
        check("answers are those of one engine", not differ, f"{differ} of {len(asked)} differ"),
    ]
    return finish(lines, args)


if __name__ == "__main__":
    sys.exit(main())
