#!/usr/bin/env python
"""Host memory and disk behind the cache: what a restored prefix costs, on the random model of `bench/model.py`,
on a CPU. What is read from disk is in the operating system's memory (a warm page cache). After a "restart" an engine
with an empty cache of its own has opened the directory; loading weights does not count.

    python bench/tiers.py [--runs 5] [--threads 1] [--json]

fp32, deterministic mode, medians of runs that alternate between the sides. Exit status 1 when a target is missed.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

from common import Line, alternate, arguments, finish, ratio, timed
from model import first_token, greedy, ids, random_model

from hybrid import CacheConfig, Engine
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.store import DirectoryStore
from hybrid.tiers.tier import HeldCopy

SHARED, NEW = 4096, 64
SIZES = (128, 512, 2048)
"""Tokens of prefixes that are restored or computed."""


class Tiers:
    """Engines on one model: with host memory, with a directory in its folder, and without."""

    def __init__(self, folder: Path) -> None:
        self._config = CacheConfig(memory="1GiB", disk="4GiB", directory=folder / "cache")
        self.device: Engine = Engine.from_pretrained(folder, dtype="float32", cache=CacheConfig(memory="1GiB"))
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
        cache = engine.cache
        cache.allocator.evict(cache.tree.evict_all)  # everything leaves the device
        if cache.tiers is not None and cache.tiers.disk is not None:
            assert cache.tiers.disk.flush()  # what waits for the disk would be had from memory
        return first_token(engine, prefix + ids(NEW))

    def offered(self, prefix: list[int], is_checked: bool) -> float:
        """Seconds of the thread for a prefix to leave for host memory, with checks of its contents or without."""
        cache = self.host.cache
        assert cache.tiers is not None and cache.tiers.host is not None
        first_token(self.host, prefix + ids(NEW))
        cache.tiers.host.clear()
        with nullcontext() if is_checked else unchecked():
            start = time.thread_time()
            cache.allocator.evict(cache.tree.evict_all)
            return time.thread_time() - start

    def came_back(self, prefix: list[int], is_checked: bool) -> float:
        """The same for it to come back."""
        cache, key = self.host.cache, Key.of(prefix + ids(1))
        cache.allocator.evict(cache.tree.evict_all)
        with nullcontext() if is_checked else unchecked():
            start = time.thread_time()
            lease = cache.open(key, len(prefix), len(key))
            seconds = time.thread_time() - start
        assert lease is not None and lease.num_hit_tokens == len(prefix)
        cache.close(lease)
        return seconds

    def chats(self, engine: Engine) -> float:
        """Seconds of conversations that fit into the device."""
        engine.cache.clear()
        shared = ids(256)

        def serve() -> None:
            for _ in range(2):
                prompts = [shared + ids(70) for _ in range(4)]
                for output in engine.generate(prompts, greedy(8), progress=False):
                    engine.generate([output.prompt_token_ids + output.token_ids], greedy(8), progress=False)

        return timed(serve)

    def beside(self, prefix: list[int], disk: str) -> float:
        """Seconds of the longest step of four requests that decode while a fifth is read for, before it computes.

        Args:
            disk: "slow": each read takes 10 ms longer; "idle": nothing is read, for as many steps.
        """
        engine, get_into, times = self.disk, DirectoryStore.get_into, list[float]()
        engine.cache.allocator.evict(engine.cache.tree.evict_all)
        assert (
            engine.cache.tiers is not None and engine.cache.tiers.disk is not None and engine.cache.tiers.disk.flush()
        )
        names = [engine.add_request(ids(NEW), greedy(200)) for _ in range(4)]
        while engine.stats().running < 4:
            engine.step()
        with patch.object(DirectoryStore, "get_into", lambda *args: (time.sleep(0.01), get_into(*args))):
            if disk == "slow":
                engine.add_request(prefix + ids(NEW), greedy(1))
            times += [timed(engine.step) for _ in range(1 if disk == "slow" else 20)]
            while engine.stats().restoring:
                times.append(timed(engine.step))
        if len(times) > 1 and disk == "slow":
            times.pop()  # the step in which it computes
        for name in names:
            engine.abort(name)
        return max(times)


@contextmanager
def unchecked() -> Iterator[None]:
    """Contents are not summed, and not looked at for NaN."""
    with (
        patch("hybrid.tiers.host.checksum_of", lambda contents: None),
        patch.object(HeldCopy, "is_intact", True),
        patch.object(CacheMemory, "are_finite", lambda *given: True),
    ):
        yield


def measure_checks(tiers: Tiers, document: list[int], runs: int) -> list[Line]:
    """What checks of contents cost."""
    sides = {"checked": True, "unchecked": False}
    lines = []
    for name, seconds in (("leaves for", tiers.offered), ("comes back from", tiers.came_back)):
        first_token(tiers.host, document + ids(NEW))
        t = alternate(runs, **{side: partial(seconds, document, own) for side, own in sides.items()})
        lines.append(ratio(f"{len(document)} tokens: {name} host memory, contents checked over not", t, *sides))
    return lines


def measure(tiers: Tiers, runs: int) -> list[Line]:
    document, few = ids(SHARED), max(2, runs // 2)
    for engine in (tiers.device, tiers.host, tiers.disk):
        first_token(engine, document + ids(NEW))
    lines = measure_checks(tiers, document, runs)
    t = alternate(
        runs,
        device=lambda: first_token(tiers.device, document + ids(NEW)),
        host=lambda: tiers.restored(tiers.host, document),
        disk=lambda: tiers.restored(tiers.disk, document),
        restarted=lambda: tiers.restarted(document),
    )
    t |= alternate(few, computed=lambda: first_token(tiers.device, ids(SHARED + NEW)))
    for where, what, most in (
        ("host", "restored from host memory", 1.3),
        ("disk", "restored from disk", 1.6),
        ("restarted", "restored from disk after a restart", 1.8),
    ):
        name = f"first token: {SHARED} + {NEW} {what}, over a hit on the device"
        lines += [ratio(name, t, where, "device", most, at_most=True)]
        lines += [ratio(f"first token: {SHARED} + {NEW} computed, over {what}", t, "computed", where, 8.0)]
    for where, engine in (("host memory", tiers.host), ("disk", tiers.disk)):
        for size in SIZES:
            prefix = ids(size)
            first_token(engine, prefix + ids(NEW))
            t = alternate(
                few,
                computed=lambda size=size: first_token(tiers.device, ids(size + NEW)),
                asked=lambda prefix=prefix, engine=engine: tiers.asked(engine, prefix),
            )
            name = f"a prefix of {size} from {where}, over computing it"
            lines += [ratio(name, t, "asked", "computed", 1.05, at_most=True)]
        t = alternate(few, off=lambda: tiers.chats(tiers.device), on=lambda engine=engine: tiers.chats(engine))
        name = f"a workload that fits into the device, with {where} over without"
        lines += [ratio(name, t, "on", "off", 1.02, at_most=True)]
        engine.cache.audit()
    t = alternate(few, slow=lambda: tiers.beside(document, "slow"), idle=lambda: tiers.beside(document, "idle"))
    name = "the longest step of four others while a disk reads that is slow, over that without it"
    lines += [ratio(name, t, "slow", "idle", 1.2, at_most=True)]
    tiers.disk.close()
    return lines


def main() -> int:
    args = arguments(__doc__, runs=5, threads=True).parse_args()
    with random_model(args) as (path, _):
        return finish(measure(Tiers(path), args.runs), args)


if __name__ == "__main__":
    sys.exit(main())
