"""`hybrid stress`: random requests in a tiny memory, with injected failures, audited.

Conversations continue, fork in the middle of their history, and are aborted; some are streamed, some hold images;
allocations, passes and deliveries fail at random; other threads call, and a timer interrupts. The same seed gives the
same run, unless it is interrupted. Without a model the right answers are known and compared; with one, the checkpoints
left at the end are compared with a recomputation, bit by bit.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.tiers import COMPUTE
from hybrid.commands.checkpoints import check_checkpoints, key_of
from hybrid.commands.commands import Outcome, refuse_given
from hybrid.commands.faults import (
    Alarm,
    FaultCounts,
    Faults,
    FaultyRunner,
    InjectedError,
    Intruder,
    computing_takes,
    failing_allocations,
    failing_files,
    nan_logits,
)
from hybrid.commands.toy_model import (
    CONFIG,
    VOCAB_SIZE,
    Liar,
    ToyRunner,
    answer_to,
    right_in_the_toy_model,
    text_of,
    toy_tokenizer,
)
from hybrid.engine.build import LoadedModel
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.requests import NOT_FINITE
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import HybridError, RequestError
from hybrid.interrupts import deferred
from hybrid.memory.memory import CacheMemory
from hybrid.models.engine_model import EngineModel
from hybrid.models.loading import has_predictor, open_checkpoint
from hybrid.prompts.images import Image, ImagePrompt
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import History
from hybrid.tree.policies import POLICIES

MAX_TOKENS = 320
"""Tokens of a prompt, without what is added to a conversation."""

MAX_LIVE = 24
MAX_STREAMS = 4
MAX_STEPS_TO_END = 20_000
"""Steps in which all requests must finish once nothing fails any more."""

IMAGE_LENGTHS = (5, 20, 33)
CAUSES = (NOT_FINITE, "InjectedError", "AlarmError", "OverflowError", "is not pinned")
"""Names that an output with an error may have."""


@dataclass
class StressReport:
    """The counts of a stress run.

    Attributes:
        leaked: pages and state slots that are neither free nor cached after all requests have ended.
        lost: requests whose last output never came, and streams that ended early.
        stuck: requests that did not finish in time once nothing failed any more.
        wrong_answers: answers that were not those of the prompt (without a model only).
        wrong_contents: reads of a page or a state slot with other contents (without a model only).
        wrong_checkpoints: checkpoints that were not the state of their key.
        wrong_errors: requests that failed with another error than an injected one.
        trespasses: calls from another thread that were not refused.
        fingerprint: of every answer in order: the same for the same seed and number of operations, without signals.
        faults: what was injected.
    """

    seed: int
    policy: str = ""
    memory: str = ""
    operations: int = 0
    steps: int = 0
    audits: int = 0
    requests: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    streams: int = 0
    images: int = 0
    forks: int = 0
    turns: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    pins: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    moved_pages: int = 0
    restored_checkpoints: int = 0
    retractions: int = 0
    checked_checkpoints: int = 0
    fingerprint: int = 0
    faults: FaultCounts = field(default_factory=FaultCounts)
    leaked: int = 0
    lost: int = 0
    stuck: int = 0
    wrong_answers: int = 0
    wrong_contents: int = 0
    wrong_checkpoints: int = 0
    wrong_errors: int = 0
    trespasses: int = 0

    @property
    def passed(self) -> bool:
        """Tell whether nothing was leaked, lost or wrong."""
        wrong = self.wrong_answers + self.wrong_contents + self.wrong_checkpoints + self.wrong_errors
        return self.leaked + self.lost + self.stuck + wrong + self.trespasses == 0

    def as_json(self) -> dict[str, Any]:
        """The report for machines."""
        fields = asdict(self)
        return {"passed": self.passed, **fields.pop("faults"), **fields}


@dataclass(frozen=True)
class AnsweredTokens:
    """Tokens that were asked and answered, and the images among them."""

    ids: list[int]
    images: tuple[Image, ...] = ()

    def cut(self, end: int) -> AnsweredTokens:
        """Its first tokens, up to `end`, without a part of an image."""
        end = min([end, *(image.start for image in self.images if image.start < end < image.end)])
        return AnsweredTokens(self.ids[:end], tuple(image for image in self.images if image.end <= end))

    @property
    def prompt(self) -> list[int] | ImagePrompt:
        """The conversation as a prompt."""
        return ImagePrompt(self.ids, self.images) if self.images else self.ids


@dataclass(frozen=True)
class StressRequest:
    """A request as it was made."""

    prompt: AnsweredTokens
    params: SamplingParams
    namespace: str


@dataclass(eq=False)
class Stream:
    """An answer that is read piece by piece."""

    asked: StressRequest
    pieces: Iterator[str]
    text: str = ""


class Stress:
    """One run.

    Args:
        engine: it computes with a `FaultyRunner`.
        toy: its model, if that is the toy model.
        faults: what fails.
        seed: of the requests.
        audit_every: operations between two audits.
        alarm: interrupts calls; None: they are not interrupted.
    """

    def __init__(
        self,
        engine: Engine,
        toy: ToyRunner | None,
        faults: Faults,
        seed: int,
        audit_every: int = 1,
        alarm: Alarm | None = None,
    ) -> None:
        self.engine: Engine = engine
        self.rng = random.Random(seed)
        elastic = "one budget" if engine.cache.memory.arena is not None else "fixed"
        self.report = StressReport(seed, str(engine.cache.config.eviction), elastic, faults=faults.counts)
        self._toy = toy
        self._faults = faults
        self._audit_every = audit_every
        self._alarm = alarm
        self._intruder = Intruder(engine, faults)
        self._images = random_images(seed, engine.model.config.hidden_size)
        self._conversations: list[AnsweredTokens] = []
        self._live: dict[str, StressRequest] = {}
        self._unsure: set[str] = set()  # their last output may have been interrupted on its way to us
        self._streams: list[Stream] = []

    def operate(self) -> None:
        """One random action, interrupted now and then, and now and then the audit."""
        self.report.operations += 1
        action = self._choose()
        is_ours = action not in (self._intrude, self._watch_stats)  # the standard library's threads are not made for it
        if self._alarm is not None and is_ours and self.rng.random() < 0.02:
            self._interrupt(self._alarm, action)
        else:
            with suppress(InjectedError):
                action()
        if self.report.operations % self._audit_every == 0:
            self._audit()

    def _choose(self) -> Callable[[], None]:
        chance = self.rng.random()
        if (chance < 0.2 and len(self._live) < MAX_LIVE) or not (self.engine.has_work or self._streams):
            return self._add
        for share, action in (
            (0.23, self._start_stream if len(self._streams) < MAX_STREAMS else self._step),
            (0.31, self._read_stream if self._streams else self._step),
            (0.313, self._generate),
            (0.345, self._abort),
            (0.35, self.engine.cache.clear),
            (0.353, self._intrude),
            (0.357, self._watch_stats),
            (0.38, self._step_with_warnings),
        ):
            if chance < share:
                return action
        return self._step

    def _interrupt(self, alarm: Alarm, action: Callable[[], None]) -> None:
        """Interrupt an action. Half of the time its outputs are taken in the same section, so that none is lost."""
        is_whole = self.rng.random() < 0.5
        before = self._faults.counts.interrupts

        def interruptible() -> None:
            with suppress(InjectedError), deferred() if is_whole else nullcontext():
                action()

        alarm.interrupt(interruptible)
        if self._faults.counts.interrupts > before and not is_whole:
            self._unsure |= self._live.keys()

    def _audit(self) -> None:
        self.engine.cache.audit()
        self.report.audits += 1

    # Actions

    def _ask(self) -> StressRequest:
        """A random request: a next turn, a fork of a conversation, or another one."""
        rng, vocab_size, grid = self.rng, self.engine.model.config.vocab_size, self.engine.cache.config.grid
        kind = rng.random() if self._conversations else 1.0
        prompt = AnsweredTokens([])
        if kind < 0.4:
            prompt = rng.choice(self._conversations)
            self.report.turns += 1
        elif kind < 0.75:
            prompt = rng.choice(self._conversations)
            prompt = prompt.cut(rng.randrange(len(prompt.ids)))
            self.report.forks += 1
        if len(prompt.ids) > MAX_TOKENS - 4 * grid:
            prompt = AnsweredTokens([])
        if rng.random() < 0.1:
            image = rng.choice(self._images)
            image = replace(image, start=len(prompt.ids))
            prompt = AnsweredTokens(prompt.ids + [0] * (image.end - image.start), (*prompt.images, image))
            self.report.images += 1
        count = rng.choice((1, 3, grid - 1, grid, grid + 1, 3 * grid))
        prompt = replace(prompt, ids=prompt.ids + [rng.randrange(vocab_size) for _ in range(count)])
        params = SamplingParams(
            max_new_tokens=rng.choice((1, 2, grid, 2 * grid + 1)),
            ignore_eos=True,
            checkpoint_at=[rng.randrange(len(prompt.ids))] if rng.random() < 0.1 else (),
            pin_for=math.inf if rng.random() < 0.05 else None,
            priority=rng.choice((0, 0, 0, 1, 5, -1)),
        )
        return StressRequest(prompt, params, rng.choice(("", "", "", "other")))

    def _add(self) -> None:
        asked = self._ask()
        try:
            request_id = self.engine.add_request(asked.prompt.prompt, asked.params, namespace=asked.namespace)
        except HybridError:
            self.report.refused += 1
            return
        self._live[request_id] = asked
        self.report.requests += 1

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        self.report.steps += 1
        for output in self.engine.step():
            if output.finish_reason is not None:
                asked = self._live.pop(output.request_id, None)
                if asked is not None:
                    self._end(output, asked)

    def _step_with_warnings(self) -> None:
        """A step in which warnings are errors, as that of a pin that is too large."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._step()

    def _watch_stats(self) -> None:
        self._intruder.watch(self._step)

    def _generate(self) -> None:
        asked = self._ask()
        with suppress(HybridError):
            prompts = [asked.prompt.prompt]
            output = self.engine.generate(prompts, asked.params, namespace=asked.namespace, progress=False)[0]
            self.report.requests += 1
            self._end(output, asked)

    def _abort(self) -> None:
        if not self._live:
            return
        with suppress(RequestError):  # it has ended, and its last output is on its way
            self.engine.abort(self.rng.choice(list(self._live)))

    def _intrude(self) -> None:
        """Call from another thread."""
        calls: list[Callable[[], object]] = [
            lambda: self.engine.add_request([1, 2, 3]),
            lambda: self.engine.generate([[1, 2, 3]], progress=False),
            self.engine.cache.clear,
        ]
        if self.engine.scheduler.has_work:
            calls.append(self.engine.step)
        if self._live:
            calls.append(lambda: self.engine.abort(next(iter(self._live))))
        self.report.trespasses += not self._intruder.intrude(self.rng.choice(calls))

    # Streams

    def _start_stream(self) -> None:
        asked = self._ask()
        with suppress(HybridError):
            pieces = self.engine.stream(asked.prompt.prompt, asked.params, namespace=asked.namespace)
            self._streams.append(Stream(asked, pieces))
            self.report.streams += 1

    def _read_stream(self) -> None:
        """Read a piece of a random stream, or close it."""
        stream = self.rng.choice(self._streams)
        is_open = False
        try:
            if self.rng.random() < 0.05:
                stream.pieces.close()  # type: ignore[attr-defined]  # an iterator of a generator function
                return
            stream.text += next(stream.pieces)
            is_open = True
        except StopIteration:
            self._check_stream(stream)
        except RequestError as error:
            self._check_error(str(error))
        except HybridError:
            self.report.refused += 1  # the queue was full when it was started
        finally:
            if not is_open:
                self._streams.remove(stream)

    def _check_stream(self, stream: Stream) -> None:
        self.report.finished += 1
        if self._toy is not None:
            tokens = self._answer(stream.asked, stream.asked.params.max_new_tokens)
            expected = "".join(text_of(token) for token in tokens)
            self.report.wrong_answers += not expected.startswith(stream.text)
            self.report.lost += len(stream.text) < len(expected)

    # Answers

    def _answer(self, asked: StressRequest, count: int) -> list[int]:
        """The right answer to a request, of the toy model."""
        return answer_to(asked.prompt.prompt, count, self.engine.cache.config.page_size)

    def _end(self, output: RequestOutput, asked: StressRequest) -> None:
        """Check and count the last output of a request."""
        report, tokens = self.report, output.token_ids
        if self._toy is not None:
            report.wrong_answers += tokens != self._answer(asked, len(tokens))
        if output.pin is not None:
            report.pins += 1
            if self.rng.random() < 0.6:
                self.engine.unpin(output.pin)
        if output.finish_reason == "abort":
            report.aborted += 1
            return
        if output.error is not None:
            self._check_error(output.error)
            return
        report.finished += 1
        report.wrong_answers += len(tokens) != asked.params.max_new_tokens
        report.prompt_tokens += output.usage.prompt_tokens
        report.hit_tokens += output.usage.cached_tokens
        report.hits += output.usage.cached_tokens > 0
        report.fingerprint = zlib.crc32(repr(tokens).encode(), report.fingerprint)
        conversation = replace(asked.prompt, ids=asked.prompt.ids + tokens)
        self._conversations = [*self._conversations[-15:], conversation]

    def _check_error(self, error: str) -> None:
        self.report.failed += 1
        self.report.wrong_errors += not any(cause in error for cause in CAUSES)

    # The end

    def finish(self) -> StressReport:
        """Let all requests end, check what is left, and count what leaked."""
        report, engine = self.report, self.engine
        self._faults.are_active = False
        for stream in list(self._streams):
            while stream in self._streams:
                self._read_stream()
        first = report.steps
        while engine.has_work and report.steps < first + MAX_STEPS_TO_END:
            self._step()
            if report.steps % self._audit_every == 0:
                self._audit()
        report.stuck = len(engine.scheduler.running) + engine.scheduler.waiting.num_requests
        report.lost += len(self._live.keys() - self._unsure)
        self._intruder.close()
        self._check_contents()
        report.retractions = engine.scheduler.num_retractions
        stats = engine.cache.stats()
        report.evicted_pages, report.evicted_checkpoints = stats.evicted_pages, stats.evicted_checkpoints
        report.moved_pages, report.restored_checkpoints = stats.moved_pages, stats.restored_checkpoints
        for pin in list(engine.cache.pins):
            engine.unpin(pin)
        engine.cache.shutdown()
        self._audit()
        stats = engine.cache.stats()
        report.leaked = stats.pages_total - stats.pages_free + stats.states_total - stats.states_free
        return report

    def _check_contents(self) -> None:
        """Check that every checkpoint is the state of its key."""
        report = self.report
        if self._toy is None:
            report.checked_checkpoints, report.wrong_checkpoints = check_checkpoints(self.engine)
            return
        report.wrong_contents = self._toy.wrong_contents
        for _, node in self.engine.cache.tree.nodes():
            if node.slot is not None:
                report.checked_checkpoints += 1
                report.wrong_checkpoints += self._toy.states[node.slot] != zlib.crc32(key_of(node))


def random_images(seed: int, hidden_size: int) -> list[Image]:
    """Images of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Image(0, 0.02 * torch.randn(count, hidden_size, generator=generator, dtype=torch.float32))
        for count in IMAGE_LENGTHS
    ]


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
    """Tell whether pages and states of a run share one budget: two of four seeds."""
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
    loaded = LoadedModel(model=EngineModel(CONFIG), device=torch.device("cpu"), tokenizer=toy_tokenizer())
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
) -> StressReport:
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
            stack.enter_context(computing_takes(COMPUTE))
            engine, toy = toy_engine(seed, faults, folder)
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
    if args.no_model:
        refuse_given(args, "--no-model runs a model of arithmetic", model="tiny", dtype="float32")
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
