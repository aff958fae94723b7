#!/usr/bin/env python
"""Many requests, and many engines one after the other: what a process holds after each part of them.

    python bench/endurance.py [--requests 100000] [--engines 300] [--json]

Requests are short, and of all sorts at once: prompts that come back and that never do, of tenants and namespaces that
come back and that never do, with answers in a form, several answers, adapters, drafts, stop texts, pins, ids of their
own; some are aborted, some have readers that leave, and memory, host and disk are too small for what is cached. Engines
are opened with tiers, with an adapter, for asyncio, and from a checkpoint, used, and closed.

A part begins when a third is done: until then tables fill that are bounded. From there on memory, objects of Python,
blocks of its allocator, threads and open files must not grow. What grew is named by its type.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Line, arguments, finish
from safetensors.torch import save_file
from tqdm import tqdm

from hybrid import AsyncEngine, CacheConfig, Engine, EngineConfig, HybridError, RequestError, SamplingParams

SETTINGS = {"page_size": 16, "chunk_size": 16}
BOUNDS = {
    "hybrid.cache.cache.MIN_GHOSTS": 500,
    "hybrid.cache.cache.GHOSTS_PER_PAGE": 0,
    "hybrid.cache.offloader.MAX_WATCHED": 500,
    "hybrid.engine.forms.MAX_GRAMMARS": 4,
    "hybrid.engine.captured_passes.MAX_GRAPHS": 8,
    "hybrid.engine.captured_passes.MAX_OCCURRED": 100,
    "hybrid.engine.scheduler.MAX_REPLAYS": 8,
    "hybrid.engine.waiting.MAX_SERVED": 100,
    "hybrid.lazy_heap.MIN_DEAD": 4,
    "hybrid.speculation.cached.MAX_TOKENS": 20_000,
    "hybrid.tree.candidates.MIN_COMPACTED": 32,
    "hybrid.tree.forest.MAX_CHANGED": 32,
    "hybrid.tree.lhd.MAX_WATCHED": 500,
    "hybrid.tree.locks.MAX_CHANGED": 32,
    "hybrid.tree.paths.MAX_OPEN": 500,
    "hybrid.tree.tree.MAX_RECENT": 100,
}
"""Sizes of tables, so small that they are full after some thousands of requests."""

LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 512}


def settings(place: Path | None, **more: Any) -> CacheConfig:
    """A cache too small for what is asked, with tiers too small for what leaves it."""
    disk = {} if place is None else {"disk": "8MiB", "directory": place / "disk"}
    return CacheConfig(**{"memory": "4MiB", "host": "2MiB", **SETTINGS, **disk, **more})


LIBC = ctypes.CDLL("libc.so.6")


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        bytes: of memory that no file backs, as the kernel counts it.
        objects: of Python that can refer to others, by type.
        blocks: of Python's allocator, whatever they are.
        threads, files: that are alive, or open.
    """

    bytes: int
    objects: Counter[type]
    blocks: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Held:
        """Count after everything that can be freed is."""
        for _ in range(3):
            gc.collect()
        LIBC.malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        anon = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        files = len(os.listdir("/proc/self/fd"))
        blocks = sys.getallocatedblocks()
        objects = Counter(map(type, gc.get_objects()))
        return cls(anon * 1024, objects, blocks, threading.active_count(), files)


class Traffic:
    """Requests of all sorts.

    Args:
        seed: of all that is random.
        adapters: names that requests may ask for.
    """

    def __init__(self, seed: int, adapters: tuple[str, ...]) -> None:
        self.rng = random.Random(seed)
        self.adapters = adapters
        self.number = 0
        self.shared = [self._tokens(self.rng.choice([5, 12, 20, 40])) for _ in range(60)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(5, 250) for _ in range(count)]

    def next(self) -> tuple[Any, SamplingParams, str]:
        """Return a prompt, its parameters, and its namespace."""
        rng, self.number = self.rng, self.number + 1
        prompt: Any = rng.choice(self.shared) + self._tokens(rng.choice([1, 2, 5, 17]))
        if rng.random() < 0.3:
            prompt = self._tokens(rng.choice([1, 5, 15, 40]))
        elif rng.random() < 0.1:
            prompt = f"Number {self.number} of many. "
        options: dict[str, Any] = {"max_new_tokens": 1}
        if rng.random() < 0.1:
            options["max_new_tokens"] = 6
        if rng.random() < 0.3:
            options["tenant"] = rng.choice(["one", "two", f"never again {self.number}"])
        if rng.random() < 0.1:
            options["priority"] = rng.randint(-5, 5)
        if rng.random() < 0.02:
            options["pin_for"] = rng.choice([0.001, 0.05])
        sort = rng.random()
        if sort < 0.005:
            options["structured"] = {"choice": [f"{self.number}", "b"]}
        elif sort < 0.02:
            options["stop"] = f"{self.number}"
        elif sort < 0.03:
            options["bad_words"] = (f"{self.number}", "a b")
        elif sort < 0.04:
            options["n"] = 2
        elif sort < 0.05:
            options.update(temperature=0.7, seed=self.number, logprobs=2)
        elif sort < 0.06:
            options["logit_bias"] = {rng.randrange(250): 1.5}
        elif sort < 0.08 and self.adapters:
            options["adapter"] = rng.choice(self.adapters)
        elif sort < 0.09:
            options["prompt_logprobs"] = 1
        namespace = rng.choice(["", "", "", "a", "b"]) if rng.random() < 0.97 else f"never again {self.number}"
        return prompt, SamplingParams(**options), namespace


def stepped(engine: Engine, traffic: Traffic, number: int) -> None:
    """Requests of a caller that steps the engine, aborts some, gives ids, and streams a few."""
    rng, live = traffic.rng, set[str]()
    left = number
    while left or engine.has_work:
        while left and len(live) < 48:
            left -= 1
            prompt, params, namespace = traffic.next()
            if rng.random() < 0.01 and params.n == 1:
                with closing(engine.stream(prompt, params, namespace=namespace)) as pieces:
                    next(pieces, None)
                continue
            name = f"own {traffic.number}" if rng.random() < 0.2 else None
            live.add(engine.add_request(prompt, params, namespace=namespace, request_id=name))
        if live and rng.random() < 0.05:
            with suppress(RequestError):  # it ended while a stream was read
                engine.abort(rng.choice(sorted(live)))
        live -= {output.request_id for output in engine.step() if output.finish_reason is not None}


async def awaited(engine: AsyncEngine, traffic: Traffic, number: int) -> None:
    """Requests of readers of an event loop, some of whom leave, or are refused."""
    rng, seats = traffic.rng, asyncio.Semaphore(64)

    async def reader() -> None:
        prompt, params, namespace = traffic.next()
        leaves = rng.random() < 0.05
        try:
            async with asyncio.timeout(0.001 if rng.random() < 0.02 else None):
                async for _ in engine.stream(prompt, params, namespace=namespace):
                    if leaves:
                        return
        except TimeoutError:
            return

    async def seated() -> None:
        async with seats:
            await reader()

    await asyncio.gather(*(seated() for _ in range(number)))
    if rng.random() < 0.2:
        with suppress(HybridError):
            await engine.generate([[10**9]])


def make_adapter(engine: Engine, folder: Path) -> Path:
    """A random LoRA adapter of one layer."""
    name, layer = next((n, m) for n, m in engine.model.named_modules() if n.endswith("mlp.gate_proj"))
    rows, columns = layer.weight.shape
    prefix = f"base_model.model.{name}"
    weights = {f"{prefix}.lora_A.weight": torch.randn(2, columns), f"{prefix}.lora_B.weight": torch.randn(rows, 2)}
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def serve(base: Engine, place: Path, number: int) -> Iterator[int]:
    """Requests on an engine that is stepped and on one for asyncio, by turns; yields how many there were."""
    adapter, limits = make_adapter(base, place / "adapter"), EngineConfig(**LIMITS)
    own = base.with_cache(settings(None), config=limits)
    other = AsyncEngine(base.with_cache(settings(place / "other"), config=limits, speculation="cache"))
    own.adapters.load("low rank", adapter)
    asyncio.run(other.call(lambda engine: engine.adapters.load("low rank", adapter)))
    traffic = Traffic(0, ("low rank",))
    while traffic.number < number:
        stepped(own, traffic, PART // 2)
        own.adapters.unload("low rank")
        own.adapters.load("low rank", adapter)
        own.load(own.dump())
        asyncio.run(awaited(other, traffic, PART // 2))
        yield traffic.number
    for stats in (own.cache.stats(), other.engine.cache.stats()):
        print(stats, file=sys.stderr)
    own.cache.audit()
    own.close()
    asyncio.run(other.close())


def open_and_close(base: Engine, place: Path, number: int) -> Iterator[int]:
    """Engines one after the other; yields how many there were."""
    adapter, limits = make_adapter(base, place / "adapter of many"), EngineConfig(**LIMITS)
    for count in range(1, number + 1):
        traffic = Traffic(count, ())
        folder = place / f"{count % 3}" if count % 2 else None
        if count % 10 == 0:
            engine = Engine.from_pretrained("tiny", device="cpu", dtype="float32", cache=settings(None), config=limits)
        else:
            engine = base.with_cache(settings(folder), config=limits, speculation=(None, "cache")[count % 4 == 1])
        if count % 5 == 1:
            engine.adapters.load("low rank", adapter)
        if count % 3 == 0:
            with_readers = AsyncEngine(engine)
            asyncio.run(awaited(with_readers, traffic, 20))
            asyncio.run(with_readers.close())
        else:
            stepped(engine, traffic, 20)
            if count % 7:  # else it is dropped as it is
                engine.close()
        if count % EVERY == 0:
            yield count


PART, EVERY = 5000, 20
"""Requests and engines of a part."""

LARGEST_GROWTH = {"requests": (256.0, 0.5), "engines": (64 * 1024.0, 5.0)}
"""Bytes and blocks of one more request, or of one more engine, from which on something is taken to grow."""


def watch(name: str, parts: Iterator[int], number: int) -> list[Line]:
    """Let the parts happen, and compare what is held after a third of them with what is held at the end."""
    seen: list[tuple[int, Held]] = []
    for count in (bar := tqdm(parts, desc=name, unit="part", disable=None)):
        held = Held.now()
        if count > number / 3:
            seen[1:] = [(count, held)]  # the first, and the latest
        megabytes, objects = held.bytes / 2**20, held.objects.total()
        bar.write(
            f"{name} {count}: {megabytes:.1f} MiB, {objects} objects, {held.blocks} blocks, {held.threads} threads, "
            f"{held.files} files",
            file=sys.stderr,
        )
    (first, before), (last, after) = seen[0], seen[-1]
    grown = {kind.__qualname__: more for kind, more in (after.objects - before.objects).most_common(40)}
    most_bytes, most_blocks = LARGEST_GROWTH[name]
    each = 1 / (last - first)
    return [
        Line("bytes of each", (after.bytes - before.bytes) * each, most_bytes, at_most=True, part=name),
        Line(
            "blocks of each", (after.blocks - before.blocks) * each, most_blocks, at_most=True, part=name, details=grown
        ),
        Line("threads more", after.threads - before.threads, 0, at_most=True, part=name),
        Line(
            "open files more",
            after.files - before.files,
            2,  # the disk reads now and then
            at_most=True,
            part=name,
        ),
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="0: none (default: 100,000)")
    parser.add_argument("--engines", type=int, default=300, help="0: none (default: 300)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, size in BOUNDS.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(sys.modules[module], constant), name
        setattr(sys.modules[module], constant, size)
    base = Engine.from_pretrained("tiny", device="cpu", dtype="float32", cache=CacheConfig(memory="2MiB", **SETTINGS))
    lines: list[Line] = []
    place = Path(tempfile.mkdtemp())
    try:
        if args.requests:
            lines += watch("requests", serve(base, place, args.requests), args.requests)
        if args.engines:
            lines += watch("engines", open_and_close(base, place, args.engines), args.engines)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return finish(lines, args, grown={line.part: line.details for line in lines if line.details})


if __name__ == "__main__":
    sys.exit(main())
