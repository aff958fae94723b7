"""Replay: the requests of traffic on an engine's scheduler, in order of arrival."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hybrid.doctor.arrivals import DECODE_RATE, PREFILL_RATE, ArrivedRequest, Pace
from hybrid.doctor.batch import Begun, ReplayLoop
from hybrid.doctor.bound import Bound
from hybrid.doctor.causes import Cause, causes_of
from hybrid.doctor.engine import EngineModel
from hybrid.doctor.engines import BOUND, engine_of, installed
from hybrid.doctor.evicted import EvictedTokens
from hybrid.doctor.past import Fact
from hybrid.doctor.report import Cure, Report, Row, amount
from hybrid.doctor.request import LoggedRequest
from hybrid.doctor.sizes import Endless, Sizes
from hybrid.doctor.text import Template
from hybrid.doctor.traffic import Traffic
from hybrid.errors import ArgumentError
from hybrid.units import BYTES

MORE_MEMORY = (2, 4)
"""Multiples of the memory that are tried as a cure."""

STATE_RATIOS = (0.4, 2.0, 4.0)
"""Memory of states over that of pages, in SGLang, that are tried as a cure; its default is 0.9."""

MAX_ENDLESS = 1 << 25
"""New tokens of traffic up to which an engine that forgets nothing is replayed beside the one that is explained."""

TIMES_ENDLESS = 64
"""Beyond these its memory is this many times that of the other: what a replay takes does not grow with the traffic."""

MEMORY = "a cache of {} bytes"
MEMORY_FLAGS = {
    "vllm": "vllm serve --kv-cache-memory-bytes {}",
    "sglang": "python -m sglang.launch_server --mem-fraction-static F, so that KV and states have {} bytes",
    "hybrid": "CacheConfig(memory={})",
}
"""The flag that gives an engine its bytes."""


def replay(
    traffic: Traffic | str | Path | Sequence[str | Path],
    model: Sizes | str | Path,
    engine: str | Iterable[str] = "vllm",
    memory: int | str | Iterable[int | str] = "24GiB",
    *,
    concurrency: int | None = None,
    models: bool = False,
    causes: bool = True,
    cures: bool = True,
    prefill_rate: float | None = None,
    decode_rate: float | None = None,
    price: float | None = None,
    users: int | None = None,
    progress: bool = False,
) -> Report:
    """Replay traffic on engines, and say what hits, what does not, why, and what would change it.

    Args:
        traffic: files, or what `Traffic.read` made of them.
        model: its sizes, or what `Sizes.of` takes.
        engine: one name or several. What is asked of the first is why, and what cures it. "bound" is what no engine
            can do better.
        memory: bytes for the cache, or a text such as "24GiB"; one or several. The first is that of causes and cures.
        concurrency: requests that are in flight at a time; None: they come by their times, where these are known, else
            one after the other.
        models: replay on this package's models of engines also where the engines are installed: they are faster.
        causes: find out why tokens of the first engine are no hits, for which one that forgets nothing is replayed
            beside it.
        cures: replay what may help too, each by itself, on models; only with causes.
        prefill_rate: tokens of prompts that are computed per second; None: times are not given, and requests that come
            by their times are served at 10,000.
        decode_rate: tokens per second of each answer; None: 50.
        price: of a million tokens of prompts that are computed; None: money is not given.
        users: of recorded sessions as many at a time, in a closed loop: the next request of each comes when its answer
            and its pause are over. None: by the times of their requests.
        progress: show bars on a terminal.

    Raises:
        ArgumentError: a file, a model, an engine or a memory is not as it must be; the message says how.
    """
    if not isinstance(traffic, Traffic):
        traffic = Traffic.read(traffic)
    sizes = model if isinstance(model, Sizes) else Sizes.of(model)
    engines = [engine] if isinstance(engine, str) else [*engine]
    memories = [memory] if isinstance(memory, int | str) else [*memory]
    sizes_of_memory = [BYTES.check("memory", given) for given in memories]
    if engines[:1] == [BOUND]:
        raise ArgumentError("a bound cannot be explained: give an engine first, as --engine vllm --engine bound")
    pace = pace_of(traffic, concurrency, prefill_rate, decode_rate, users)
    rows: list[Row] = []
    for name in engines:
        if name == BOUND:
            rows += _bounds(traffic, sizes, sizes_of_memory, progress)
            continue
        for size in sizes_of_memory:
            is_first = causes and not rows
            rows.append(_run(traffic, sizes, name, size, pace, models=models, with_causes=is_first, progress=progress))
    if prefill_rate is None and pace.concurrency is not None:
        for row in rows:
            row.waits = ()  # no rate is stated
    report = Report(traffic, sizes, rows, str(pace), prefill_rate=prefill_rate, price=price)
    if cures and causes:
        report.cures = _cures(traffic, sizes, rows[0], pace, progress)
    return report


def pace_of(
    traffic: Traffic,
    concurrency: int | None,
    prefill_rate: float | None,
    decode_rate: float | None,
    users: int | None = None,
) -> Pace:
    """How the requests of traffic come: of as many sessions at a time, as many at a time, else by their times, else one
    after the other.

    Raises:
        ArgumentError: a number is less than it must be.
    """
    rates = prefill_rate or PREFILL_RATE, decode_rate or DECODE_RATE
    if concurrency is not None and concurrency < 1:
        raise ArgumentError(f"--concurrency must be at least 1 request at a time; got {concurrency}")
    if users is not None and (users < 1 or concurrency is not None or not traffic.turns):
        raise ArgumentError(
            f"--users N is a number of recorded sessions at a time, at least 1, without --concurrency; got {users}"
            + ("" if traffic.turns else ", and this traffic is no recorded sessions but a log")
        )
    if min(rates) <= 0:
        raise ArgumentError(f"rates must be above 0 tokens per second; got {prefill_rate} and {decode_rate}")
    return Pace(concurrency or (None if traffic.has_times else 1), *rates, users)


def _run(
    traffic: Traffic,
    sizes: Sizes,
    name: str,
    memory: int,
    pace: Pace,
    *,
    models: bool = True,
    with_causes: bool = False,
    progress: bool = False,
    **options: Any,
) -> Row:
    """One replay."""
    engine, own = engine_of(name, sizes, memory, **options), installed(name, sizes)
    make = None if models else own.make
    row = Row(name, memory, traffic.num_prompt_tokens, scheduler="a model" if models else own.name)
    given = _shown(traffic, f"{name}, {amount(memory)}", progress)
    arrivals = pace.arrivals(traffic, given)
    is_serial = pace.concurrency == 1
    is_endless = traffic.num_new_tokens <= MAX_ENDLESS
    most = Endless(traffic.num_tokens) if is_endless else TIMES_ENDLESS * memory
    endless = engine_of(name, sizes, most, **options) if with_causes else None
    in_turn = engine_of(name, sizes, most, **options) if with_causes and not is_serial else None
    evicted = EvictedTokens()
    start = time.perf_counter()
    if make is not None:
        served = make(sizes, memory, arrivals, endless).run()
    elif is_serial:
        served = _one_by_one(engine, given, endless)
    else:
        served = ReplayLoop(engine, arrivals, endless).run()
    saved = whole = 0.0
    with _without_collector():
        for (number, request, fact, _), hit, kept in served:
            row.hit_tokens += hit.num_tokens
            saved, whole = saved + sizes.cost(hit.num_tokens), whole + sizes.cost(request.num_prompt)
            if is_serial and make is None:
                arrivals.waits.append((request.num_prompt - hit.num_tokens) / pace.prefill_rate)
            if with_causes:
                finished = in_turn.serve(request) if in_turn is not None else None
                found = causes_of(request, fact, hit, kept, finished, is_endless)
                for cause, count in found.items():
                    row.causes[cause] = row.causes.get(cause, 0) + count
                lost = found.get(Cause.EVICTED, 0) + found.get(Cause.STATE_EVICTED, 0)
                evicted.add(number, request, fact, hit.num_tokens, lost)
    row.seconds, row.waits = time.perf_counter() - start, arrivals.waits
    row.saved_compute = 100 * saved / max(1.0, whole) if sizes.crossover else None
    if with_causes:
        row.evicted = evicted.parts()
    return row


@contextmanager
def _without_collector() -> Iterator[None]:
    """Run without Python's collector of cycles: there are none to collect, and it takes a tenth of the time to find
    that out."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _one_by_one(
    engine: EngineModel, given: Iterable[tuple[LoggedRequest, Fact]], endless: EngineModel | None
) -> Iterator[Begun]:
    """Serve requests, each when the one before has ended."""
    for number, (request, fact) in enumerate(given):
        hit = engine.serve(request)
        yield Begun(
            ArrivedRequest(number, request, fact, None), hit, endless.serve(request) if endless is not None else hit
        )


def _bounds(traffic: Traffic, sizes: Sizes, memories: Sequence[int], progress: bool) -> list[Row]:
    """The bound for each memory."""
    start, bound = time.perf_counter(), Bound(sizes)
    for request, _ in _shown(traffic, BOUND, progress):
        bound.add(request)
    seconds = time.perf_counter() - start
    return [Row(BOUND, size, traffic.num_prompt_tokens, bound.hit_tokens(size), seconds) for size in memories]


def _shown(traffic: Traffic, title: str, progress: bool) -> Iterable[tuple[LoggedRequest, Fact]]:
    """The requests, with a bar on a terminal."""
    disable = None if progress else True
    return tqdm(traffic, desc=title, total=traffic.num_requests, unit="request", disable=disable, leave=False)


CHANGES = {
    Cause.TOOLS: ("tools in one order", "sort_tools"),
    Cause.THINKING: ("thinking kept in the history", "keep_thinking"),
    Cause.DATE: ("dates and ids at the end of the prompt", "move_dates"),
}
"""Changes of texts in the client: what is changed, and by which field of `Template`, by the cause that it removes."""

HELPS_MORE = 1.05
"""All of these together are shown where they save this many times what the best of them saves alone: one cause can hide
another."""


@dataclass
class Try:
    """Something that may help.

    Attributes:
        name: what is changed.
        how: what to type or to do.
        engine, memory, options: what is replayed.
        template: arguments of `Template`, for texts that are written differently; empty: as they are.
        causes: it is tried where one of these was found; empty: always.
        in_turn: requests come one after the other.
    """

    name: str
    how: str
    engine: str
    memory: int
    options: dict[str, Any] = field(default_factory=dict)
    template: dict[str, bool] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
    in_turn: bool = False


def _tries(row: Row, sizes: Sizes) -> list[Try]:
    """What may help an engine."""
    name, memory = row.engine, row.memory
    found = []
    for times in MORE_MEMORY:
        size = memory * times
        found.append(Try(f"{times} times the memory", MEMORY_FLAGS.get(name, MEMORY).format(size), name, size))
    if name == "vllm":
        block = "vllm serve --prefix-cache-retention-interval None"
        found.append(Try("a state at every end of a step", block, name, memory, {"retention": None}))
    if name == "sglang" and sizes.state_bytes:
        for ratio in STATE_RATIOS:
            flag = f"python -m sglang.launch_server --mamba-full-memory-ratio {ratio}"
            title = f"{ratio} times as much memory for states as for pages"
            found.append(Try(title, flag, name, memory, {"state_ratio": ratio}))
    if name != "hybrid":
        how = (
            "replayed with this package's own cache; a part of it comes by a flag: vllm serve --scheduler-cls "
            "hybrid.vllm.Scheduler, or in SGLang --radix-cache-backend hybrid"
        )
        found.append(Try("eviction and placement of this package", how, "hybrid", memory))
    where = "in the client, or in the chat template"
    for cause, (title, change) in CHANGES.items():
        found.append(Try(title, where, name, memory, {}, {change: True}, (cause,)))
    how = f"{where}: {', '.join(title for title, _ in CHANGES.values())}"
    changes = {change: True for _, change in CHANGES.values()}
    found.append(Try("all changes of texts together", how, name, memory, {}, changes, tuple(CHANGES)))
    how = "in the client: the first of those that share a beginning, and the others when it answers"
    found.append(Try("one request after the other", how, name, memory, causes=(Cause.TOGETHER,), in_turn=True))
    return found


def _cures(traffic: Traffic, sizes: Sizes, row: Row, pace: Pace, progress: bool) -> list[Cure]:
    """Replay what may help, each by itself, and changes of texts also together; the best first."""
    made, most = [], 0  # most that one change of texts saves
    for each in _tries(row, sizes):
        if each.causes and not any(row.causes.get(cause) for cause in each.causes):
            continue
        other = traffic
        if each.template:
            other = Traffic.read(traffic.paths, Template(traffic.tokenizer, **each.template))
        how = pace._replace(concurrency=1, users=None) if each.in_turn else pace
        tried = _run(other, sizes, each.engine, each.memory, how, progress=progress, **each.options)
        cure = Cure(each.name, each.how, tried.num_tokens, tried.hit_tokens, row.computed - tried.computed)
        if len(each.template) < 2 or cure.saved > HELPS_MORE * most:  # else one change does what all do
            made.append(cure)
        most = max(most, cure.saved) if each.template else most
    return sorted(made, key=lambda cure: -cure.saved)
