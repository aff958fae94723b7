"""`hybrid stress`: random requests in a tiny memory, with injected failures, audited.

Conversations continue, fork in the middle of their history, and are aborted; allocations and forward passes fail at
random. The same seed gives the same run. With a model, the checkpoints left at the end are compared with a
recomputation, bit by bit.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.pins import Pin
from hybrid.commands.command import MODEL_HELP, Command, Outcome
from hybrid.engine.build import LoadedModel
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine
from hybrid.engine.model_runner import Pending, Result
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.scheduler import Step
from hybrid.errors import HybridError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory, Pool
from hybrid.tree.policies import POLICIES

GRID = 16
PAGES = 40
STATES = 12
MAX_TOKENS = PAGES * GRID // 2
MAX_LIVE = 24
FAILING_ALLOCATIONS = 0.02
FAILING_PASSES = 0.01
LIMITS = EngineConfig(max_num_seqs=6, max_num_batched_tokens=5 * GRID)


class InjectedError(Exception):
    """An injected failure of a forward pass."""


class LostPending:
    """A pass that was launched and whose results never arrive."""

    def wait(self) -> list[Result]:
        """Fails."""
        raise InjectedError


@dataclass(frozen=True)
class KnownPending:
    """A pass whose results are known."""

    results: list[Result]

    def wait(self) -> list[Result]:
        """The results."""
        return self.results


class RandomRunner:
    """Gives every part a random token: the bookkeeping without a model."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng, self._vocab_size = rng, vocab_size

    def plan(self, step: Step) -> Step:
        """The step itself."""
        return step

    def launch(self, plan: Step) -> Pending:
        """Random tokens."""
        return KnownPending(
            [Result(True, self._rng.randrange(self._vocab_size) if part.samples else None, None) for part in plan.parts]
        )


@dataclass
class Report:
    """What a stress run did.

    Attributes:
        leaked: pages and state slots that nobody owns after everything has ended and the cache has been cleared.
        wrong_checkpoints: checkpoints that were not the state of their key (with a model only).
        fingerprint: of every answer in order: the same seed and number of operations give the same one.
    """

    seed: int
    operations: int = 0
    steps: int = 0
    audits: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    forks: int = 0
    turns: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    retractions: int = 0
    failed_allocations: int = 0
    failed_passes: int = 0
    refused: int = 0
    pins: int = 0
    moved_pages: int = 0
    policy: str = ""
    memory: str = ""
    checked_checkpoints: int = 0
    wrong_checkpoints: int = 0
    leaked: int = 0
    fingerprint: int = 0

    @property
    def passed(self) -> bool:
        return self.leaked == 0 and self.wrong_checkpoints == 0

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def fail_at_random(pool: Pool, dice: random.Random, report: Report) -> Callable[[], None]:
    """Make a pool's allocations fail now and then; returns how to stop that."""
    allocate = pool.allocate

    def unreliable(count: int) -> list[int] | None:
        if dice.random() < FAILING_ALLOCATIONS:
            report.failed_allocations += 1
            return None
        return allocate(count)

    pool.allocate = unreliable  # type: ignore[method-assign]

    def stop() -> None:
        del pool.allocate

    return stop


class Stress:
    """One run."""

    def __init__(self, engine: Engine, seed: int, audit_every: int = 1) -> None:
        self.engine = engine
        self.dice: random.Random = random.Random(seed)
        elastic = "one budget" if engine.cache.memory.arena is not None else "fixed"
        self.report: Report = Report(seed, policy=str(engine.cache.config.eviction), memory=elastic)
        self._audit_every = audit_every
        self._histories: list[list[int]] = []
        self._live: list[str] = []
        self._pins: list[Pin] = []
        faults = random.Random(seed + 2)
        self._heal = [
            fail_at_random(pool, faults, self.report)
            for pool in (engine.cache.memory.pages, engine.cache.memory.states)
        ]
        launch = engine.runner.launch

        def unreliable(plan: Any) -> Pending:
            pending = launch(plan)
            if faults.random() < FAILING_PASSES:
                self.report.failed_passes += 1
                if faults.random() < 0.5:
                    raise InjectedError  # after the pass has written, and before it is committed
                return LostPending()
            return pending

        engine.runner.launch = unreliable  # type: ignore[method-assign]

    def operate(self) -> None:
        """One random action, and now and then the audit."""
        dice, report = self.dice, self.report
        report.operations += 1
        action = dice.random()
        if (action < 0.25 and len(self._live) < MAX_LIVE) or not self.engine.has_work:
            self._add()
        elif action < 0.29 and self._live:
            self.engine.abort(self._live.pop(dice.randrange(len(self._live))))
            report.aborted += 1
        elif action < 0.295:
            self.engine.cache.clear()
        else:
            self._step()
        if report.operations % self._audit_every == 0:
            self.engine.cache.audit()
            report.audits += 1

    def finish(self) -> Report:
        """Let everybody end, check what is left, and count what leaked."""
        report, cache = self.report, self.engine.cache
        for heal in self._heal:
            heal()
        while self.engine.has_work:
            self._step()
            cache.audit()
            report.audits += 1
        if not isinstance(self.engine.runner, RandomRunner):
            report.checked_checkpoints, report.wrong_checkpoints = check_checkpoints(self.engine)
        stats = cache.stats()
        report.evicted_pages, report.evicted_checkpoints = stats.evicted_pages, stats.evicted_checkpoints
        report.moved_pages = stats.moved_pages
        for pin in list(cache.pins):
            self.engine.unpin(pin)
        report.retractions = self.engine.scheduler.num_retractions
        cache.clear()
        cache.audit()
        report.audits += 1
        stats = cache.stats()
        report.leaked = stats.pages_total - stats.pages_free + stats.states_total - stats.states_free
        return report

    def _add(self) -> None:
        dice, vocab = self.dice, self.engine.model.config.vocab_size
        kind = dice.random() if self._histories else 1.0
        prompt: list[int] = []
        if kind < 0.4:
            prompt = list(dice.choice(self._histories))
            self.report.turns += 1
        elif kind < 0.75:
            history = dice.choice(self._histories)
            prompt = history[: dice.randrange(len(history))]
            self.report.forks += 1
        prompt += [dice.randrange(vocab) for _ in range(dice.choice((1, 3, GRID - 1, GRID, GRID + 1, 3 * GRID)))]
        params = SamplingParams(
            max_new_tokens=dice.choice((1, 2, GRID, 2 * GRID + 1)),
            ignore_eos=True,
            checkpoint_at=[dice.randrange(len(prompt))] if dice.random() < 0.1 else (),
            pin_for=math.inf if dice.random() < 0.05 else None,
            priority=dice.choice((0, 0, 0, 1)),
        )
        namespace = dice.choice(("", "", "", "other"))
        if len(prompt) > MAX_TOKENS:
            prompt = prompt[-GRID:]
        try:
            self._live.append(self.engine.add_request(prompt, params, namespace=namespace))
            self.report.requests += 1
        except HybridError:
            self.report.refused += 1

    def _step(self) -> None:
        self.report.steps += 1
        try:
            outputs = self.engine.step()
        except InjectedError:
            return
        for output in outputs:
            if output.finish_reason not in (None, "abort"):
                self._end(output)

    def _end(self, output: RequestOutput) -> None:
        report = self.report
        report.finished += 1
        report.prompt_tokens += output.usage.prompt_tokens
        report.hit_tokens += output.usage.cached_tokens
        report.hits += output.usage.cached_tokens > 0
        report.fingerprint = hash((report.fingerprint, *output.token_ids))
        if output.pin is not None:
            report.pins += 1
            self._pins.append(output.pin)
            if len(self._pins) > 2:
                self.engine.unpin(self._pins.pop(0))
        if output.request_id in self._live:
            self._live.remove(output.request_id)
        self._histories = [*self._histories[-15:], output.prompt_token_ids + output.token_ids]


def check_checkpoints(engine: Engine) -> tuple[int, int]:
    """Compare every checkpoint in the tree with the state of its key, computed anew: (checked, wrong).

    Bit by bit in deterministic mode; within rounding in the other, where decoded states are shared as they are.
    """
    cache = engine.cache
    cold = engine.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=True), size=(2 * PAGES, STATES))
    wrong = checked = 0
    for namespace, node in list(cache.tree.nodes()):
        if node.slot is None:
            continue
        checked += 1
        edges, above = [], node
        while above.parent is not None:
            edges.append(above.edge)
            above = above.parent
        ids = memoryview(b"".join(reversed(edges))).cast("i").tolist()
        cold.cache.clear()
        cold.generate([[*ids, 0]], SamplingParams(max_new_tokens=1), namespace=namespace, progress=False)
        lease = cold.cache.open_whole(Key.of(ids, namespace))
        assert lease is not None
        assert lease.num_hit_tokens == len(ids)
        for name, tensor in cache.state_tensors.items():
            expected = cold.cache.state_tensors[name][lease.read_slot]
            bound = 0.0 if engine.deterministic else 1e-4 * float(expected.abs().max())
            wrong += not torch.allclose(tensor[node.slot], expected, rtol=0.0, atol=bound)
        cold.cache.close(lease)
    return checked, wrong


def make_engine(model: str | Path | None, seed: int) -> Engine:
    """A tiny engine: on a model in fp32, or on none. Even seeds run in deterministic mode, odd ones in the other; two
    of four with one budget for pages and states, two with a fixed split; each policy has its turn, "lhd" with seed
    0."""
    policy = list(POLICIES)[-1 - seed % len(POLICIES)]
    elastic = seed // 2 % 2 == 0
    config = CacheConfig(
        page_size=GRID, chunk_size=GRID, memory="2GiB", deterministic=seed % 2 == 0, eviction=policy, seed=seed
    )
    if model is not None:
        engine = Engine.from_pretrained(model, dtype="float32", cache=config, config=LIMITS)
        if elastic:
            page_bytes, state_bytes = engine.cache.unit_bytes
            return engine.with_cache(replace(config, memory=PAGES * page_bytes + STATES * state_bytes))
        return engine.with_cache(config, size=(PAGES, STATES))
    nothing = SimpleNamespace(config=SimpleNamespace(vocab_size=50, max_position_embeddings=100_000, hidden_size=1))
    if elastic:
        memory = CacheMemory.of_bytes((PAGES + 3 * STATES) * 64, 64, 180)
    else:
        memory = CacheMemory.of_indices(PAGES, STATES)
    runner = RandomRunner(random.Random(seed + 1), nothing.config.vocab_size)
    loaded = LoadedModel(model=nothing, device=torch.device("cpu"))
    return Engine(loaded, HybridCache(memory, config), LIMITS, runner=runner)


def run_stress(
    model: str | Path | None,
    seed: int,
    seconds: float,
    operations: int | None,
    progress: bool | None = None,
    audit_every: int = 1,
) -> Report:
    """Work for a span of time, or for a number of operations.

    Args:
        model: a checkpoint, or None for the bookkeeping alone.
        seed: of the work; also chooses mode, memory and policy (`make_engine`).
        operations: stop after so many; None: stop by time.
        audit_every: operations between two audits.
    """
    run = Stress(make_engine(model, seed), seed, audit_every)
    end = time.monotonic() + seconds
    with tqdm(total=operations, desc="stress", unit="op", disable=None if progress is None else not progress) as bar:
        while run.report.operations < operations if operations is not None else time.monotonic() < end:
            run.operate()
            bar.update()
    return run.finish()


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid stress`."""
    add = parser.add_argument
    add("--model", default="tiny", help=MODEL_HELP)
    add("--no-model", action="store_true", help="bookkeeping only: tokens are random numbers")
    add("--seconds", type=float, default=20.0, help="duration (default: 20)")
    add("--operations", type=int, default=None, help="stop after this number of operations instead")
    add("--audit-every", type=int, help="operations between audits (default: 1 with a model, 100 without)")
    add(
        "--seed",
        type=int,
        default=0,
        help="the same seed gives the same run; it also selects mode (odd: not deterministic), memory and policy",
    )


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Run the stress test, and print its report."""
    report = run_stress(
        None if args.no_model else args.model,
        args.seed,
        args.seconds,
        args.operations,
        progress=not args.json and None,
        audit_every=args.audit_every or (100 if args.no_model else 1),
    )
    result = report.as_json()
    for name, value in result.items():
        if name not in ("passed", "leaked"):
            console.print(f"{name.replace('_', ' '):>22}: {value}")
    console.print(f"{'leaked':>22}: {report.leaked}")
    return Outcome(report.passed, result)


COMMAND = Command(
    name="stress",
    help="random requests with injected failures, audited",
    description=(
        "Random conversations, forks, aborts, pins and moves in a tiny memory, with failing allocations and failing "
        "forward passes, audited. Nothing may leak, and every checkpoint must be the state of its key."
    ),
    add_arguments=add_arguments,
    run=run,
)
