#!/usr/bin/env python
"""Host memory behind the cache: what a restored prefix costs, on the random model of `bench/prefix_reuse.py`, on a CPU.

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


class Tiers:
    """Engines on one model: with host memory, and without.

    Args:
        sides: prompts, and the engine without.
    """

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.device: Engine = sides.ours
        self.host: Engine = self.device.with_cache(CacheConfig(memory="1GiB", host="2GiB"))

    def restored(self, prefix: list[int]) -> float:
        """Seconds to the first token after a prefix that comes from host memory."""
        evict(self.host)
        before = self.host.cache.stats().restored_tokens
        seconds = self.sides.first_token(self.host, [*prefix, *self.sides.ids(NEW)])
        assert self.host.cache.stats().restored_tokens == before + len(prefix), "it was not restored"
        return seconds

    def asked(self, prefix: list[int]) -> float:
        """The same where the engine decides whether to restore."""
        evict(self.host)
        return self.sides.first_token(self.host, [*prefix, *self.sides.ids(NEW)])

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
    for engine in (tiers.device, tiers.host):
        sides.first_token(engine, [*document, *sides.ids(NEW)])
    lines: list[Line] = []
    t = alternate(
        runs,
        device=lambda: sides.first_token(tiers.device, [*document, *sides.ids(NEW)]),
        host=lambda: tiers.restored(document),
    )
    name = f"first token: {SHARED} + {NEW} restored from host memory, over a hit on the device"
    lines += [ratio(name, t, "host", "device", 1.3, at_most=True)]
    t |= alternate(few, computed=lambda: sides.first_token(tiers.device, sides.ids(SHARED + NEW)))
    lines += [ratio(f"first token: {SHARED} + {NEW} computed, over restored", t, "computed", "host", 8.0)]
    for size in SIZES:
        prefix = sides.ids(size)
        sides.first_token(tiers.host, [*prefix, *sides.ids(NEW)])
        t = alternate(
            few,
            computed=lambda size=size: sides.first_token(tiers.device, sides.ids(size + NEW)),
            asked=lambda prefix=prefix: tiers.asked(prefix),
        )
        lines += [
            ratio(f"a prefix of {size} from host memory, over computing it", t, "asked", "computed", 1.05, at_most=True)
        ]
    t = alternate(few, off=lambda: tiers.chats(tiers.device), on=lambda: tiers.chats(tiers.host))
    lines += [
        ratio("a workload that fits into the device, with host memory over without", t, "on", "off", 1.02, at_most=True)
    ]
    tiers.host.cache.audit()
    return lines


def main() -> int:
    args = arguments(__doc__, runs=5, threads=True).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs = save_random_model(Path(folder))
        lines = measure(Tiers(Sides(Path(folder), theirs)), args.runs)
    return finish(lines, machine(), args.json)


if __name__ == "__main__":
    sys.exit(main())
