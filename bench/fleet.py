#!/usr/bin/env python
"""Rules that send requests to the replicas of a fleet, on traces: hits, balance, and the time of the first token.

    python bench/fleet.py                                                  # the table: five traces, 8 replicas
    python bench/fleet.py --traces lmsys --rules home,one --seeds 101 --no-ids
    python bench/fleet.py --traces lmsys --replicas 64 --scale 32 --memory 96 --delay 0.5 --failures 8
    python bench/fleet.py --traces lmsys --lost 0.1 --doubled 0.1 --delay 0.1   # events that do not come, or come twice
    python bench/fleet.py --rules home --shared 1 --bandwidth 25           # a tier that all replicas share
    python bench/fleet.py --cost                                           # microseconds of an event, and of a choice

Each replica is the bookkeeping of a cache, without tensors, and computes one prompt after the other; answers hold up
none, and are in the cache when the prompt is computed. Its speed is such that one cache of the sum of all memories
would keep the fleet busy for `--util` of the time. What the replicas have reaches the rule as events, `--delay` seconds
late. The rule "home" is the router of `hybrid.fleet`, as it is.

| rule | where a request goes |
|---|---|
| one | one cache of the sum of memories: the best that there is |
| session | a hash of the session; without ids, of the first 256 tokens |
| text | longest prefix of those that went there, which are not forgotten; under a tenth the shorter queue of two |
| pages | deepest pages, and queued work |
| checkpoint | deepest checkpoint, and queued work |
| home | home and memory |

Constants of "home" were set on the traces' own seeds (1 to 4); a line with another seed is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from array import array
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
from common import Line, arguments, finish
from hit_rate import GEOMETRIES, PAGE, NoContents, serve
from traces import make

from hybrid import CacheConfig, CacheMemory, HybridCache
from hybrid.events import Change, Feed
from hybrid.fleet import Index, Router, Weights
from hybrid.key import Key, names_of
from hybrid.tiers.cost import Cost
from hybrid.tiers.host import HostTier
from hybrid.tiers.tier import Name, Note

CELLS = {"lmsys": (12.0, 4), "fewshot": (8.0, 2), "swebench_nc": (30.0, 2), "sharegpt": (8.0, 2), "swebench": (20.0, 2)}
"""Traces of the table: gigabytes of the fleet, and times as many sessions as the trace has, for 8 replicas."""

AWAY = 10.0
"""Seconds for which a replica that failed is away."""

HEARTBEAT = 1.0
"""Seconds after which a replica says its number, so that a rule asks for what it lacks, as followers of sockets do."""

SMALLER = 1024
"""With a shared tier all sizes are divided by this: it holds bytes."""

PAGE_BYTES = PAGE * 4
"""Bytes of the token ids of a page."""


@dataclass(eq=False)
class Request:
    """A request of a trace.

    Attributes:
        at: when it comes, in seconds.
        session: of the trace.
        key: of its prompt and its answer.
        num_input: tokens of the prompt.
        replica: where it was sent.
        promised: tokens that the rule counted on.
        place: what the rule keeps of it.
        names: of its pages, while it is under way.
    """

    at: float
    session: int
    key: Key
    num_input: int
    replica: int = -1
    promised: int = 0
    place: Any = None
    names: list[bytes] = field(default_factory=list)

    def name_pages(self) -> list[bytes]:
        """The digests at the ends of the prompt's pages, as far as a hit may go."""
        return names_of(self.key.ids[: (self.num_input - 1) * 4], self.key.namespace, PAGE_BYTES)


def requests_of(name: str, seed: int | None, scale: int) -> list[Request]:
    """The requests of a trace."""
    made, found = make(name, seed, scale), []
    made.reverse()
    while made:
        one = made.pop()
        ids = array("i", one["input_tokens"])
        found.append(Request(one["ts"], one["session_id"], Key.of(ids + array("i", one["output_tokens"])), len(ids)))
    return found


class Shared(HostTier):
    """Copies that all replicas share: the library's tier in host memory, one for all caches.

    Args:
        num_bytes: that it holds.
        bandwidth: bytes a second of a restore.
    """

    def __init__(self, num_bytes: int, bandwidth: float) -> None:
        super().__init__(num_bytes // SMALLER)
        self.cost = Cost(0.0, SMALLER / bandwidth)

    def restored(self, name: bytes, is_copied_again: bool) -> None:
        """Keep what one replica has now, for the others."""

    def note(self, name: Name) -> Note | None:
        """As of another process: the policy of one cache does not know what another's has learned."""
        found = super().note(name)
        return found and replace(found, usage=None)


class Replica:
    """A replica: a cache, and a queue of prompts.

    Args:
        memory: bytes of its cache.
        seed: of its policy.
        rate: tokens that it computes in a second.
        shared: the tier behind it; None: there is none.

    Attributes:
        cache: its bookkeeping.
        queue: prompts that wait, with the one that is computed.
        computed: tokens of prompts that it has computed.
        life: number of failures before.
    """

    def __init__(self, memory: int, seed: int, rate: float, shared: Shared | None) -> None:
        self._make = (memory, seed, rate, shared)
        self.queue: deque[Request] = deque()
        self.computed = 0
        self.life = 0
        self.begin()

    def begin(self) -> None:
        """Begin with an empty cache."""
        memory, seed, rate, shared = self._make
        kv_bytes, state_bytes = GEOMETRIES["qwen35_4b"]
        sizes = [size // (1 if shared is None else SMALLER) for size in (memory, PAGE * kv_bytes, state_bytes)]
        if shared is None:
            config = CacheConfig(page_size=PAGE, chunk_size=PAGE, seed=seed)
            self.cache = HybridCache(CacheMemory.of_bytes(*sizes), config)
        else:
            config = CacheConfig(page_size=PAGE, chunk_size=PAGE, seed=seed, host=shared.num_bytes)
            with patch("hybrid.cache.tiers.HostTier", lambda *_, **__: shared):
                self.cache = HybridCache(CacheMemory.of_bytes(*sizes, mover=NoContents(*sizes[1:])), config)
            self.cache.note_pass(int(rate), 1.0)
        self.feed: Feed = self.cache.subscribe()
        self._read = 0

    def serve(self, request: Request) -> tuple[int, int]:
        """Serve a request. Returns the tokens that it need not compute, and the bytes that were restored for it."""
        before = self.cache.stats().restored_bytes
        hit, _ = serve(self.cache, request.key, request.num_input)
        after = self.cache.stats().restored_bytes
        return hit, (after - before) * SMALLER

    def changes(self) -> list[Change]:
        """The changes since the last call."""
        changes = self.feed.since(self._read)
        assert changes is not None, "more changes than a feed remembers"
        self._read = self.feed.number
        return changes


# Rules


class Rule:
    """Sends requests to replicas, of which it sees events.

    Args:
        num_replicas: there are.
        weights: of the library's router.
        with_ids: requests name their sessions.
    """

    def __init__(self, num_replicas: int, weights: Weights, with_ids: bool) -> None:
        self.num_replicas = num_replicas
        self.with_ids = with_ids
        self.alive = set(range(num_replicas))
        self.queued = [0.0] * num_replicas
        self.waiting = [0] * num_replicas

    def apply(self, replica: int, changes: Sequence[Change]) -> None:
        """See what a replica took and gave up."""

    def choose(self, request: Request, now: float) -> int:
        """The replica for a request. Sets what was promised."""
        raise NotImplementedError

    def sent(self, request: Request) -> None:
        """Count what waits."""
        self.queued[request.replica] += request.num_input - request.promised
        self.waiting[request.replica] += 1

    def computed(self, request: Request) -> None:
        """A prompt is computed, or its replica failed."""
        self.queued[request.replica] -= request.num_input - request.promised
        self.waiting[request.replica] -= 1

    def failed(self, replica: int) -> None:
        """A replica has gone."""
        self.alive.discard(replica)

    def returned(self, replica: int) -> None:
        """A replica is there again, with an empty cache."""
        self.alive.add(replica)


class SessionHash(Rule):
    """A ring of hashes of the session, or of the first 256 tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        points = ((self._hash(f"{one}-{at}".encode()), one) for one in range(self.num_replicas) for at in range(100))
        self._ring = sorted(points)

    @staticmethod
    def _hash(text: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())

    def choose(self, request: Request, now: float) -> int:
        text = str(request.session).encode() if self.with_ids else request.key.ids[: 256 * 4]
        at = bisect(self._ring, (self._hash(text), 0))
        while self._ring[at % len(self._ring)][1] not in self.alive:
            at += 1
        return self._ring[at % len(self._ring)][1]


class TextPrefixes(Rule):
    """Prefixes of 16 tokens that went to a replica, which are never forgotten, as Ray's router with its defaults."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rng = Random(0)
        self._sent: dict[bytes, set[int]] = defaultdict(set)

    def choose(self, request: Request, now: float) -> int:
        names = names_of(request.key.ids[: request.num_input * 4], "", 16 * 4)
        known = next((at for at, name in enumerate(names) if name not in self._sent), len(names))
        best = self._sent[names[known - 1]] & self.alive if known else set()
        if not best or known * 16 < 0.1 * request.num_input:
            best = set(self._rng.sample(sorted(self.alive), min(2, len(self.alive))))
        chosen = min(best, key=lambda one: (self.waiting[one], one))
        for name in names:
            self._sent[name].add(chosen)
        return chosen


class Deepest(Rule):
    """What a replica has to compute, and what is queued there."""

    by = "pages"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._index = Index(PAGE)

    def apply(self, replica: int, changes: Sequence[Change]) -> None:
        self._index.apply(replica, changes)

    def choose(self, request: Request, now: float) -> int:
        depths = getattr(self._index.find(request.names), self.by)
        chosen = min(self.alive, key=lambda one: (self.queued[one] - depths[one], self.queued[one], one))
        request.promised = int(depths[chosen])
        return chosen

    def failed(self, replica: int) -> None:
        super().failed(replica)
        self._index.forget(replica)


class DeepestCheckpoint(Deepest):
    """The same by checkpoints."""

    by = "checkpoints"


class Home(Rule):
    """The router of the library."""

    def __init__(self, num_replicas: int, weights: Weights, with_ids: bool) -> None:
        super().__init__(num_replicas, weights, with_ids)
        self._router = Router(PAGE, weights)
        for replica in range(num_replicas):
            self._router.add(replica)

    def apply(self, replica: int, changes: Sequence[Change]) -> None:
        self._router.apply(replica, changes)

    def choose(self, request: Request, now: float) -> int:
        session = str(request.session) if self.with_ids else None
        request.place = self._router.choose(request.names, request.num_input, now, session)
        request.promised = request.place.promised
        return request.place.replica

    def computed(self, request: Request) -> None:
        """A prompt is computed, and so is its answer."""
        answer = len(request.key) - request.num_input
        self._router.ended(request.place, answer)

    def sent(self, request: Request) -> None:
        """It is counted already."""

    def failed(self, replica: int) -> None:
        self._router.remove(replica)

    def returned(self, replica: int) -> None:
        self._router.add(replica)


RULES: dict[str, Callable[[int, Weights, bool], Rule]] = {
    "session": SessionHash,
    "text": TextPrefixes,
    "pages": Deepest,
    "checkpoint": DeepestCheckpoint,
    "home": Home,
}

ARRIVAL, COMPUTED, EVENTS, MISSING, FAILURE, RETURN = range(6)
"""What happens."""


class Fleet:
    """A simulation.

    Args:
        replicas: of the fleet.
        rule: chooses.
        rate: tokens that a replica computes in a second.
        delay: seconds until an event is seen.
        bandwidth: bytes a second that are restored.
        lost, doubled: parts of the messages with events that do not come, or come twice.
    """

    def __init__(
        self,
        replicas: list[Replica],
        rule: Rule,
        rate: float,
        delay: float,
        bandwidth: float,
        lost: float = 0.0,
        doubled: float = 0.0,
    ) -> None:
        self._replicas = replicas
        self._rule = rule
        self._rate = rate
        self._delay = delay
        self._bandwidth = bandwidth
        self._lost, self._doubled, self._rng = lost, doubled, Random(0)
        self._sent = [0] * len(replicas)  # numbers of the last changes that were sent
        self._seen = [0] * len(replicas)
        self._heap: list[tuple[float, int, int, Any]] = []
        self._count = count()
        self.asked = self.hits = self.promised = self.wrong = self.num_again = 0
        self.first: list[float] = []
        self.seconds: list[float] = []

    def run(self, requests: Sequence[Request], failures: Sequence[tuple[float, int]]) -> None:
        """Run all requests. `failures`: when, and which replica; it is there again after `AWAY` seconds."""
        for request in requests:
            self._push(request.at, ARRIVAL, request)
        for at, replica in failures:
            self._push(at, FAILURE, replica)
        while self._heap:
            now, _, what, thing = heappop(self._heap)
            if what == ARRIVAL:
                self._send(thing, now)
            elif what == COMPUTED:
                self._computed(*thing, now)
            elif what == EVENTS:
                self._see(*thing, now)
            elif what == MISSING:
                self._make_good(*thing)
            elif what == FAILURE:
                self._fail(thing, now)
            else:
                self._replicas[thing].begin()
                self._sent[thing] = self._seen[thing] = 0
                self._rule.returned(thing)

    def _push(self, at: float, what: int, thing: Any) -> None:
        heappush(self._heap, (at, next(self._count), what, thing))

    def _send(self, request: Request, now: float) -> None:
        request.promised = 0
        request.names = request.name_pages()
        start = time.perf_counter()
        request.replica = self._rule.choose(request, now)
        self.seconds.append(time.perf_counter() - start)
        self._rule.sent(request)
        queue = self._replicas[request.replica].queue
        queue.append(request)
        if len(queue) == 1:
            self._begin(request.replica, now)

    def _begin(self, number: int, now: float) -> None:
        replica = self._replicas[number]
        request = replica.queue[0]
        hit, restored = replica.serve(request)
        seconds = (request.num_input - hit) / self._rate + restored / self._bandwidth
        self._push(now + seconds, COMPUTED, (number, replica.life, request, hit, replica.changes()))

    def _computed(self, number: int, life: int, request: Request, hit: int, changes: list[Change], now: float) -> None:
        replica = self._replicas[number]
        if life != replica.life:
            return
        self._sent[number] += len(changes)
        if self._rng.random() < self._lost:
            self._push(now + HEARTBEAT + 2 * self._delay, MISSING, (number, life))
        else:
            message = (number, life, self._sent[number], changes)
            if self._delay:
                self._push(now + self._delay, EVENTS, message)
            else:
                self._see(*message, now)
            if self._rng.random() < self._doubled:
                self._push(now + self._delay + self._rng.random(), EVENTS, message)
        replica.computed += request.num_input - hit
        self.asked += request.num_input
        self.hits += hit
        self.promised += request.promised
        self.wrong += max(0, request.promised - hit)
        self.first.append(now - request.at)
        self._rule.computed(request)
        request.names = []
        replica.queue.popleft()
        if replica.queue:
            self._begin(number, now)

    def _see(self, number: int, life: int, last: int, changes: list[Change], now: float) -> None:
        """A message has come, as `hybrid.events.sockets.Follower` takes it: by its number."""
        if life != self._replicas[number].life:
            return
        fresh = last - self._seen[number]
        if fresh > len(changes):
            self._push(now + 2 * self._delay, MISSING, (number, life))
        elif fresh > 0:
            self._rule.apply(number, changes[len(changes) - fresh :])
            self._seen[number] = last

    def _make_good(self, number: int, life: int) -> None:
        """What was missing has come."""
        replica = self._replicas[number]
        missing = self._sent[number] - self._seen[number]
        if life != replica.life or not missing:
            return
        changes = replica.feed.since(self._seen[number])
        assert changes is not None, "more changes than a feed remembers"
        self._rule.apply(number, changes[:missing])
        self._seen[number] = self._sent[number]

    def _fail(self, number: int, now: float) -> None:
        """A replica fails: what waits there runs elsewhere."""
        replica = self._replicas[number]
        replica.life += 1
        again = [*replica.queue]
        replica.queue.clear()
        self.num_again += len(again)
        for request in again:
            self._rule.computed(request)
        self._rule.failed(number)
        for request in again:
            self._send(request, now)
        self._push(now + AWAY, RETURN, number)

    def line(self, title: str, **details: Any) -> Line:
        """What came of it."""
        first, computed = sorted(self.first), [replica.computed for replica in self._replicas]
        found = {
            "max_over_mean": round(max(computed) / max(1.0, fmean(computed)), 2),
            "p50_first_s": round(first[len(first) // 2], 2),
            "p95_first_s": round(first[int(0.95 * len(first))], 2),
            "promises_broken_pct": round(100 * self.wrong / self.asked, 2),
            "us_per_choice": round(1e6 * float(np.median(self.seconds)), 1),
            "sent_again": self.num_again,
        }
        hit = round(100 * self.hits / self.asked, 2)
        return Line(title, hit, unit="%", details=details | found)


@patch("hybrid.tiers.cost.Cost.note", lambda *args: None)  # nothing is copied: it takes as long as is assumed
@patch("hybrid.cache.tiers.free_memory", lambda device: 1 << 60)
def run(args: argparse.Namespace, trace: str, seed: int | None) -> Iterator[Line]:
    """Run a trace with each rule."""
    memory, scale = CELLS[trace]
    memory = args.memory or memory * args.replicas / 8
    scale = args.scale or max(1, scale * args.replicas // 8)
    requests = requests_of(trace, seed, scale)
    span = requests[-1].at - requests[0].at
    title = f"{trace} {memory:g} GB x{scale}, seed {'own' if seed is None else seed}"
    one = Fleet([Replica(int(memory * 1e9), 0, 1e12, None)], SessionHash(1, args.weights, True), 1e12, 0.0, 1e30)
    one.run(requests, ())
    if "one" in args.rules:
        yield one.line(f"{title}: one", requests=len(requests))
    rate = (one.asked - one.hits) / span / args.replicas / args.util
    rng = Random(seed)
    places = rng.sample(range(args.replicas), min(args.failures, args.replicas))
    failures = [(requests[0].at + rng.random() * span, place) for place in places]
    bandwidth = args.bandwidth * 1e9
    for name in args.rules:
        if name == "one":
            continue
        for with_ids in args.ids if name in ("session", "home") else args.ids[:1]:  # the others look at no id
            shared = Shared(int(args.shared * memory * 1e9), bandwidth) if args.shared else None
            each = int(memory * 1e9 / args.replicas)
            replicas = [Replica(each, number, rate, shared) for number in range(args.replicas)]
            rule, faults = RULES[name](args.replicas, args.weights, with_ids), (args.lost, args.doubled)
            fleet = Fleet(replicas, rule, rate, args.delay, bandwidth, *faults)
            start = time.perf_counter()
            fleet.run(requests, failures)
            ids = ", no ids" if name in ("session", "home") and not with_ids else ""
            wall = round(time.perf_counter() - start, 1)
            yield fleet.line(f"{title}: {name}{ids}", tokens_per_second=round(rate), wall_s=wall)


# What it costs


def least(function: Callable[[], object], times: int = 200) -> float:
    """The least of the microseconds that calls take."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return round(1e6 * min(found), 1)


def costs() -> Iterator[Line]:
    """What a change of the cache costs where it is subscribed to, and what a choice costs."""
    requests = requests_of("lmsys", None, 1)[:600]
    seconds = []
    for is_subscribed in (False, True) * 10:
        cache = HybridCache(CacheMemory.of_bytes(3 * 10**9, PAGE * 32768, 51511296), CacheConfig(seed=1))
        feed = cache.subscribe(1 << 20) if is_subscribed else None
        start = time.thread_time()
        for request in requests:
            serve(cache, request.key, request.num_input)
        seconds.append(time.thread_time() - start)
        if feed is not None:
            changes = feed.since(0) or []
    num_units = sum(len(change.each_name) for change in changes)
    more = min(seconds[1::2]) - min(seconds[::2])
    details = {
        "events": len(changes),
        "pages_and_checkpoints": num_units,
        "seconds": [round(one, 2) for one in seconds],
    }
    per_unit = round(1e6 * more / num_units, 2)
    yield Line("an event, of one page or checkpoint", per_unit, 5.0, at_most=True, unit="us", details=details)

    rng = np.random.default_rng(0)
    ids = rng.integers(3, 32000, 32768, dtype=np.int32).tobytes()
    names = names_of(ids, "", PAGE_BYTES)[:511]
    for num_replicas, target in ((64, 50.0), (1000, 200.0)):
        for title, depths in (
            ("each at another depth", range(512 - min(num_replicas, 500), 512)),
            ("a common prefix", (22,)),
        ):
            router = Router(PAGE)
            for replica in range(num_replicas):
                router.add(replica)
                depth = depths[replica % len(depths)]
                router.apply(replica, path(names[:depth], [depth]))
            for replica in range(3):
                router.apply(replica, path(names[: 500 - 100 * replica], range(30, 500 - 100 * replica, 10)))
            found = least(lambda: router.index.find(names))  # noqa: B023
            chosen = least(lambda: router.ended(router.choose(names, 32768, 0.0, "ann")))  # noqa: B023
            details = {"looking": found, "choosing_reserving_ending": chosen}
            yield Line(f"a choice of {num_replicas}, {title}", found, target, at_most=True, unit="us", details=details)


def path(names: list[bytes], checkpoints: Iterable[int]) -> list[Change]:
    """The births of a path."""
    pages = Change(True, "pages", b"".join(names), len(names) * PAGE)
    return [pages, *(Change(True, "checkpoint", names[at - 1], at * PAGE) for at in checkpoints)]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)

    def names(known: Iterable[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            wrong = [name for name in text.split(",") if name not in known]
            if wrong:
                raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose from {', '.join(known)}")
            return text.split(",")

        return read

    rules = ["one", *RULES]
    parser.add_argument("--traces", type=names(CELLS), default=[*CELLS], help="(default: all five)")
    parser.add_argument("--rules", type=names(rules), default=rules, help=f"(default: {','.join(rules)})")
    parser.add_argument("--seeds", default="own", help="of the traces, with commas; own: the traces' own (default)")
    parser.add_argument("--replicas", type=int, default=8, help="(default: 8)")
    parser.add_argument("--memory", type=float, help="GB of the fleet (default: the table's, by the replicas)")
    parser.add_argument("--scale", type=int, help="times as many sessions (default: the table's, by the replicas)")
    parser.add_argument("--util", type=float, default=0.25, help="(default: 0.25)")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until an event is seen (default: 0)")
    parser.add_argument("--lost", type=float, default=0.0, help="part of the events that do not come (default: 0)")
    parser.add_argument("--doubled", type=float, default=0.0, help="part of them that come twice (default: 0)")
    parser.add_argument("--failures", type=int, default=0, help=f"replicas that fail once, for {AWAY:g} s (default: 0)")
    parser.add_argument("--shared", type=float, default=0.0, help="a shared tier, times the memory (default: 0)")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="of the shared tier, GB/s (default: 25)")
    parser.add_argument("--no-ids", dest="ids", action="store_const", const=[False], help="requests name no session")
    parser.add_argument("--both", dest="ids", action="store_const", const=[True, False], help="with ids, and without")
    parser.add_argument("--weights", default="", help="of the router, as in home=0.5,load=2 (default: the library's)")
    parser.add_argument("--cost", action="store_true", help="measure what events and choices cost instead")
    parser.set_defaults(ids=[True])
    args = parser.parse_args(given)
    args.weights = Weights(
        **{name: float(value) for name, value in (one.split("=") for one in args.weights.split(",") if one)}
    )
    args.seeds = [None if seed == "own" else int(seed) for seed in args.seeds.split(",")]
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse(given)
    lines = []
    if args.cost:
        return finish([*costs()], args)
    for trace in args.traces:
        for seed in args.seeds:
            for line in run(args, trace, seed):
                lines.append(line)
                print(line.name, line.value, line.details, file=sys.stderr, flush=True)
    shown = {
        name: getattr(args, name)
        for name in ("replicas", "util", "delay", "lost", "doubled", "failures", "shared", "bandwidth")
    }
    return finish(lines, args, **shown)


if __name__ == "__main__":
    sys.exit(main())
