"""The failures of a stress run: of allocations, passes, tokens, threads and signals."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from hybrid.cache import tiers
from hybrid.cache.stats import CacheStats
from hybrid.engine.engine import Engine
from hybrid.engine.model_runner import LaunchedPass, Runner
from hybrid.engine.results import Result
from hybrid.errors import OwnershipError
from hybrid.memory.arena import ArenaPool
from hybrid.memory.pool import IndexPool
from hybrid.tiers.cost import MeasuredTime
from hybrid.tiers.store import DirectoryStore
from hybrid.tiers.tier import Contents

FAILING_ALLOCATIONS = 0.02
FAILING_PASSES = 0.005
FAILING_TOKENS = 0.0005
NAN_PASSES = 0.001
FAILING_TRANSFERS = 0.01
FAILING_FILES = 0.1
LONGEST_DELAY = 0.002
"""Seconds until a timer goes off, at most."""

OVERFLOW = 1 << 40
"""A token that no array of ids can hold: what fails is its delivery."""


class InjectedError(Exception):
    """An injected failure of a forward pass."""


class AlarmError(Exception):
    """Raised by the handler of a timer, at any bytecode."""


@dataclass
class FaultCounts:
    """Counts of what was injected.

    Attributes:
        failed_allocations: allocations that found no memory, although there was some.
        failed_passes: passes that raised, or whose results never arrived.
        failed_tokens: tokens whose delivery raises.
        nan_passes: passes that computed NaN for a request.
        failed_transfers: copies to a tier and back that raised (without a model only).
        failed_files: writes and reads of files of the disk that raised, or read a wrong bit.
        interrupts: calls that the handler of a timer interrupted.
        intrusions: calls from another thread that were refused.
    """

    failed_allocations: int = 0
    failed_passes: int = 0
    failed_tokens: int = 0
    nan_passes: int = 0
    failed_transfers: int = 0
    failed_files: int = 0
    interrupts: int = 0
    intrusions: int = 0


class Faults:
    """Decides when something fails.

    Args:
        seed: the same seed gives the same faults.

    Attributes:
        rng: the random numbers of the faults.
        counts: what was injected.
        are_active: set to False at the end of a run, so that what is left can finish.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts = FaultCounts()
        self.are_active: bool = True

    def strike(self, chance: float) -> bool:
        """Tell whether something fails now that fails with this probability."""
        return self.are_active and self.rng.random() < chance

    def transfer(self) -> None:
        """Raise, if a copy to or from a tier fails now."""
        if self.strike(FAILING_TRANSFERS):
            self.counts.failed_transfers += 1
            raise OSError(5, "Input/output error")

    def make_nan(self) -> bool:
        """Tell whether a pass yields NaN for a request now."""
        strikes = self.strike(NAN_PASSES)
        self.counts.nan_passes += strikes
        return strikes


@contextmanager
def failing_allocations(faults: Faults) -> Iterator[None]:
    """Have allocations of every pool fail at random."""

    def failing(allocate: Callable[[Any, int], list[int] | None]) -> Callable[[Any, int], list[int] | None]:
        def unreliable(pool: IndexPool | ArenaPool, count: int) -> list[int] | None:
            if faults.strike(FAILING_ALLOCATIONS):
                faults.counts.failed_allocations += 1
                return None
            return allocate(pool, count)

        return unreliable

    with ExitStack() as stack:
        for kind in (IndexPool, ArenaPool):
            stack.enter_context(patch.object(kind, "allocate", failing(kind.allocate)))
        yield


@contextmanager
def failing_files(faults: Faults, seed: int) -> Iterator[None]:
    """Have files of the disk fail at random: they cannot be written or read, or are read with a wrong bit.

    Args:
        seed: threads of the disk have random numbers of their own, so that the others stay what they are.
    """
    rng = random.Random(seed)
    write, read = DirectoryStore.put_from, DirectoryStore.get_into

    def strike() -> bool:
        strikes = faults.are_active and rng.random() < FAILING_FILES
        faults.counts.failed_files += strikes
        return strikes

    def put_from(store: DirectoryStore, name: str, parts: Sequence[Contents]) -> None:
        if strike():
            raise OSError(5, "Input/output error")
        write(store, name, parts)

    def get_into(store: DirectoryStore, name: str, start: int, buffer: memoryview) -> None:
        strikes = strike()
        if strikes and rng.random() < 0.5:
            raise OSError(5, "Input/output error")
        read(store, name, start, buffer)
        if strikes and buffer:
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)

    with patch.object(DirectoryStore, "put_from", put_from), patch.object(DirectoryStore, "get_into", get_into):
        yield


@contextmanager
def computing_takes(seconds: float) -> Iterator[None]:
    """Have the tiers of caches that are made meanwhile take each computed token to take so long: beside a model that
    takes no time, or with a disk that others use too, no restore would be worth it."""
    with patch.object(tiers, "COMPUTE", seconds), patch.object(MeasuredTime, "note", lambda *_: None):
        yield


@dataclass(frozen=True)
class LostPass:
    """A pass that was launched, and whose results never arrive."""

    inner: LaunchedPass

    def results(self) -> list[Result]:
        """Fails."""
        raise InjectedError


@dataclass(frozen=True)
class OverflowingPass:
    """A pass with one token, of the part `at`, that cannot be delivered."""

    inner: LaunchedPass
    at: int

    def results(self) -> list[Result]:
        """One result per part."""
        results = self.inner.results()
        at = self.at % len(results)
        if results[at].tokens:
            results[at] = results[at]._replace(tokens=(*results[at].tokens[:-1], OVERFLOW))
        return results


class FaultyRunner:
    """A `Runner` whose passes fail at random: before anything is returned, while they are waited for, or in one token.

    Args:
        runner: computes the steps.
        faults: decides which passes fail.
    """

    def __init__(self, runner: Runner, faults: Faults) -> None:
        self._runner = runner
        self._faults = faults

    def plan(self, step: Any, before: Any) -> Any:
        """The runner's plan. It is given the pass that it has launched itself."""
        is_own = isinstance(before, LostPass | OverflowingPass)
        return self._runner.plan(step, before.inner if is_own else before)

    def launch(self, plan: Any) -> LaunchedPass:
        """Launch a plan. It may raise after the pass has written its pages and states."""
        launched, faults = self._runner.launch(plan), self._faults
        if faults.strike(FAILING_PASSES):
            faults.counts.failed_passes += 1
            if faults.rng.random() < 0.5:
                raise InjectedError
            return LostPass(launched)
        if faults.strike(FAILING_TOKENS):
            faults.counts.failed_tokens += 1
            return OverflowingPass(launched, faults.rng.randrange(1 << 16))
        return launched


def nan_logits(faults: Faults) -> Callable[[Any, Any, torch.Tensor], torch.Tensor | None]:
    """A forward hook of a model that makes the logits of one row NaN, at random."""

    def hook(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor | None:
        if not len(logits) or not faults.make_nan():
            return None
        logits = logits.clone()
        logits[faults.rng.randrange(len(logits))] = torch.nan
        return logits

    return hook


class Intruder:
    """Calls an engine from a thread that does not own it."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine = engine
        self._faults = faults
        self._thread = ThreadPoolExecutor(max_workers=1)

    def intrude(self, call: Callable[[], object]) -> bool:
        """Make a call from the other thread. Returns whether it was refused, as it must be."""
        try:
            self._thread.submit(call).result()
        except OwnershipError:
            self._faults.counts.intrusions += 1
            return True
        return False

    def watch(self, call: Callable[[], None]) -> CacheStats:
        """Read the statistics of the cache from the other thread during a call of the owner."""
        stats = self._thread.submit(self._engine.cache.stats)
        call()
        return stats.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class Alarm:
    """A real timer whose handler raises `AlarmError`, at whatever bytecode the main thread is.

    Args:
        faults: where interrupts are counted, and what chooses the delays.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._is_armed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGALRM, and put the former handler back at the end. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals reach the main thread only")
        former = signal.signal(signal.SIGALRM, self._handle)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise AlarmError

    def interrupt(self, call: Callable[[], None]) -> None:
        """Make a call, and interrupt it after a random delay, unless it has returned before."""
        try:
            try:
                self._is_armed = True
                signal.setitimer(signal.ITIMER_REAL, self._faults.rng.uniform(1e-5, LONGEST_DELAY))
                call()
            finally:
                self._is_armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            self._faults.counts.interrupts += 1
