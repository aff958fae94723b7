"""`hybrid stress`: random requests in a tiny memory, with injected failures, audited.

Conversations continue, fork in the middle of their history, and are aborted; some are streamed, some hold images;
allocations, passes and deliveries fail at random; other threads call, and a timer interrupts. The same seed gives the
same run, unless it is interrupted. Without a model the right answers are known and compared; with one, the checkpoints
left at the end are compared with a recomputation, bit by bit.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from rich.console import Console
from tqdm import tqdm

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.commands.command import Outcome
from hybrid.commands.faults import (
    Alarm,
    Faults,
    FaultyRunner,
    computing_as_assumed,
    failing_allocations,
    failing_files,
    nan_logits,
)
from hybrid.commands.liar import Liar, right_in_the_toy_model
from hybrid.commands.toy_model import CONFIG, VOCAB_SIZE, ToyRunner, toy_tokenizer
from hybrid.commands.workload import Report, Stress
from hybrid.engine.build import LoadedModel
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine
from hybrid.memory.memory import CacheMemory
from hybrid.models.loading import has_predictor, open_checkpoint
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import History
from hybrid.tree.policies import POLICIES

GRID = 16
PAGES = 112
STATES = 28
HOST = 20_000
"""Bytes of host memory: a few hundred of the toy model's pages, and dozens of its states."""

DISK = 60_000
"""Bytes on disk: a dozen segments, which have 4 kB at least."""

LIMITS = EngineConfig(max_num_seqs=6, max_num_batched_tokens=5 * GRID, max_waiting=20)


def cache_config(seed: int, folder: Path) -> CacheConfig:
    """The cache of a run. Even seeds run in deterministic mode, odd ones in the other; each policy has its turn, "lhd"
    with seed 0. Of 64 seeds the second 16 keep copies in host memory, the third on disk, and the fourth in both, where
    pages and states share one budget.

    Args:
        folder: for copies on disk.
    """
    host, disk = seed // 16 % 2 == 1 and is_elastic(seed), seed // 32 % 2 == 1 and is_elastic(seed)
    policy = list(POLICIES)[-1 - seed % len(POLICIES)]
    return CacheConfig(
        page_size=GRID,
        chunk_size=GRID,
        memory="2GiB",
        host=HOST if host else None,
        disk=DISK if disk else None,
        directory=folder / "cache" if disk else None,
        deterministic=seed % 2 == 0,
        eviction=policy,
        seed=seed,
    )


def is_elastic(seed: int) -> bool:
    """Whether pages and states of a run share one budget: two of four seeds."""
    return seed // 2 % 2 == 0


def limits(seed: int) -> EngineConfig:
    """The settings of the engine of a run. Of eight seeds the last four schedule steps ahead, as on a GPU."""
    return replace(LIMITS, overlap=seed // 4 % 2 == 1)


def speculation(
    seed: int, vocab_size: int, right: Callable[[History, int], list[int]] | None = None, own: Sequence[str] = ()
) -> SpeculationConfig | None:
    """The drafters of a run. Of sixteen seeds the last eight draft: what was cached, and lies; right tokens where they
    are known; and what the model's `own` drafter says, if it has one."""
    if seed // 8 % 2 == 0:
        return None
    liar = Liar(seed, vocab_size, right or (lambda *_: []))
    return SpeculationConfig(drafters=("cache", liar, *own), adaptive=False)


def toy_engine(seed: int, faults: Faults, folder: Path) -> tuple[Engine, ToyRunner]:
    """A tiny engine on the toy model."""
    toy = ToyRunner(GRID, faults.make_nan, faults.transfer)
    if is_elastic(seed):
        memory = CacheMemory.of_bytes((PAGES + 3 * STATES) * 64, 64, 180, mover=toy)
    else:
        memory = CacheMemory.of_indices(PAGES, STATES)
    loaded = LoadedModel(model=SimpleNamespace(config=CONFIG), device=torch.device("cpu"), tokenizer=toy_tokenizer())
    cache = HybridCache(memory, cache_config(seed, folder), model="toy")
    drafts = speculation(seed, VOCAB_SIZE, right_in_the_toy_model)
    return Engine(loaded, cache, limits(seed), runner=FaultyRunner(toy, faults), speculation=drafts), toy


def model_engine(model: str | Path, dtype: str, seed: int, faults: Faults, folder: Path) -> Engine:
    """A tiny engine on a model, in a type."""
    config = cache_config(seed, folder)
    without = replace(config, host=None, disk=None, directory=None)
    own = ("mtp",) if has_predictor(open_checkpoint(model)) and seed // 8 % 2 else ()
    predicting = SpeculationConfig(drafters=own) if own else None
    engine = Engine.from_pretrained(model, dtype=dtype, cache=without, config=limits(seed), speculation=predicting)
    if is_elastic(seed):
        page_bytes, state_bytes = engine.cache.unit_bytes
        memory = PAGES * page_bytes + STATES * state_bytes
        engine = engine.with_cache(
            replace(
                config, memory=memory, host=memory if config.host else None, disk=4 * memory if config.disk else None
            )
        )
    else:
        engine = engine.with_cache(config, size=(PAGES, STATES))
    drafts = speculation(seed, engine.model.config.vocab_size, own=own)
    runner = FaultyRunner(engine.runner, faults)
    return Engine(engine.loaded, engine.cache, engine.config, runner=runner, speculation=drafts)


def run_stress(
    model: str | Path | None,
    seed: int,
    seconds: float,
    operations: int | None,
    *,
    dtype: str = "float32",
    progress: bool | None = None,
    audit_every: int = 1,
    signals: bool = False,
) -> Report:
    """Run for a number of seconds, or for a number of operations.

    Args:
        model: a checkpoint, or None for the toy model.
        seed: of the requests and faults; also selects mode, memory, policy, overlap and drafts.
        seconds: duration.
        operations: stop after this number of operations instead.
        dtype: that the model runs in.
        progress: show a progress bar; None: when there is a terminal.
        audit_every: operations between two audits.
        signals: interrupt calls by a real timer. The run cannot be repeated then.
    """
    faults, toy = Faults(seed + 2), None
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of pins that are too large
        for name in ("hybrid.engine", "hybrid.tiers"):
            log = logging.getLogger(name)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)  # requests that fail are expected, and files too
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(failing_files(faults, seed))
        if model is None:
            engine, toy = toy_engine(seed, faults, folder)
            stack.enter_context(computing_as_assumed())
        else:
            engine = model_engine(model, dtype, seed, faults, folder)
            stack.callback(engine.model.register_forward_hook(nan_logits(faults)).remove)
        alarm = Alarm(faults) if signals else None
        run = Stress(engine, toy, faults, seed, audit_every, alarm)
        end = time.monotonic() + seconds
        bar = tqdm(total=operations, desc="stress", unit="op", disable=None if progress is None else not progress)
        with bar, failing_allocations(faults), alarm.installed() if alarm is not None else nullcontext():
            while run.report.operations < operations if operations is not None else time.monotonic() < end:
                run.operate()
                bar.update()
        return run.finish()


# The command


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Run the stress test, and print its report."""
    report = run_stress(
        None if args.no_model else args.model,
        args.seed,
        args.seconds,
        args.operations,
        dtype=args.dtype,
        progress=not args.json and None,
        audit_every=args.audit_every or (100 if args.no_model else 1),
        signals=not args.no_signals and threading.current_thread() is threading.main_thread(),
    )
    result = report.as_json()
    for name, value in result.items():
        console.print(f"{name.replace('_', ' '):>22}: {value}")
    return Outcome(report.passed, result)
