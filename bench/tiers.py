#!/usr/bin/env python
"""Host memory and disk behind the cache: what a restored prefix costs, on the random model of `bench/prefix_reuse.py`,
on a CPU. What is read from disk is in the operating system's memory (a warm page cache). After a "restart" an engine
with an empty cache of its own has opened the directory; loading weights does not count.

    python bench/tiers.py [--runs 5] [--threads 1] [--json]

fp32, deterministic mode, medians of runs that alternate between the sides. Exit status 1 when a target is missed.
"""

import sys
import tempfile
from pathlib import Path

import torch
from common import Line, alternate, arguments, finish, machine, ratio, timed
from prefix_reuse import NEW, SHARED, Sides, save_random_model

from hybrid import CacheConfig, Engine, SamplingParams

SIZES = (128, 512, 2048)
"""Tokens of prefixes that are restored or computed."""

CHAT = SamplingParams(max_new_tokens=8, ignore_eos=True)


def evict(engine: Engine) -> None:
    """Everything leaves the device."""
    engine.cache.allocator.evict(engine.cache.tree.evict_all)


def flush(engine: Engine) -> None:
    """What waits for the disk would be had from memory."""
    if engine.cache.tiers is not None and engine.cache.tiers.disk is not None:
        assert engine.cache.tiers.disk.flush()


class Tiers:
    """Engines on one model: with host memory, with a directory, and without.

    Args:
        sides: prompts, and the engine without.
        folder: for the directory.
    """

    def __init__(self, sides: Sides, folder: Path) -> None:
        self.sides = sides
        self._config = CacheConfig(memory="1GiB", disk="4GiB", directory=folder / "cache")
        self.device: Engine = sides.ours
        self.host: Engine = self.device.with_cache(CacheConfig(memory="1GiB", host="2GiB"))
        self.disk: Engine = self.device.with_cache(self._config)

    def restored(self, engine: Engine, prefix: list[int]) -> float:
        """Seconds to the first token after a prefix that comes from a tier."""
        before = engine.cache.stats().restored_tokens
        seconds = self.asked(engine, prefix)
        assert engine.cache.stats().restored_tokens == before + len(prefix), "it was not restored"
        return seconds

    def restarted(self, prefix: list[int]) -> float:
        """The same, the first request of an engine that finds the directory."""
        self.disk.close()
        self.disk = self.device.with_cache(self._config)
        return self.restored(self.disk, prefix)

    def asked(self, engine: Engine, prefix: list[int]) -> float:
        """The same where the engine decides whether to restore."""
        evict(engine)
        flush(engine)
        return self.sides.first_token(engine, [*prefix, *self.sides.ids(NEW)])

    def chats(self, engine: Engine) -> float:
        """Seconds of conversations that fit into the device."""
        engine.cache.clear()
        shared = self.sides.ids(256)

        def serve() -> None:
            for _ in range(2):
                prompts = [shared + self.sides.ids(70) for _ in range(4)]
                for output in engine.generate(prompts, CHAT, progress=False):
                    engine.generate([output.prompt_token_ids + output.token_ids], CHAT, progress=False)

        return timed(serve)


def measure(tiers: Tiers, runs: int) -> list[Line]:
    sides, document, few = tiers.sides, tiers.sides.ids(SHARED), max(2, runs // 2)
    for engine in (tiers.device, tiers.host, tiers.disk):
        sides.first_token(engine, [*document, *sides.ids(NEW)])
    lines: list[Line] = []
    t = alternate(
        runs,
        device=lambda: sides.first_token(tiers.device, [*document, *sides.ids(NEW)]),
        host=lambda: tiers.restored(tiers.host, document),
        disk=lambda: tiers.restored(tiers.disk, document),
        restarted=lambda: tiers.restarted(document),
    )
    t |= alternate(few, computed=lambda: sides.first_token(tiers.device, sides.ids(SHARED + NEW)))
    for where, what, most in (
        ("host", "restored from host memory", 1.3),
        ("disk", "restored from disk", 1.6),
        ("restarted", "restored from disk after a restart", 1.8),
    ):
        name = f"first token: {SHARED} + {NEW} {what}, over a hit on the device"
        lines += [ratio(name, t, where, "device", most, at_most=True)]
        lines += [ratio(f"first token: {SHARED} + {NEW} computed, over {what}", t, "computed", where, 8.0)]
    for where, kept in (("host memory", lambda: tiers.host), ("disk", lambda: tiers.disk)):
        for size in SIZES:
            prefix = sides.ids(size)
            sides.first_token(kept(), [*prefix, *sides.ids(NEW)])
            t = alternate(
                few,
                computed=lambda size=size: sides.first_token(tiers.device, sides.ids(size + NEW)),
                asked=lambda prefix=prefix, kept=kept: tiers.asked(kept(), prefix),
            )
            name = f"a prefix of {size} from {where}, over computing it"
            lines += [ratio(name, t, "asked", "computed", 1.05, at_most=True)]
    for where, engine in (("disk", tiers.disk), ("host memory", tiers.host)):
        t = alternate(few, off=lambda: tiers.chats(tiers.device), on=lambda engine=engine: tiers.chats(engine))
        name = f"a workload that fits into the device, with {where} over without"
        lines += [ratio(name, t, "on", "off", 1.02, at_most=True)]
    for engine in (tiers.host, tiers.disk):
        engine.cache.audit()
    tiers.disk.close()
    return lines


def main() -> int:
    args = arguments(__doc__, runs=5, threads=True).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs = save_random_model(Path(folder))
        lines = measure(Tiers(Sides(Path(folder), theirs), Path(folder)), args.runs)
    return finish(lines, machine(), args.json)


if __name__ == "__main__":
    sys.exit(main())
