"""The random requests of a stress run, and what is checked of their answers."""

from __future__ import annotations

import math
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hybrid.commands.checkpoints import check_checkpoints, key_of
from hybrid.commands.faults import Alarm, FaultCounts, Faults, InjectedError, Intruder
from hybrid.commands.toy_model import ToyRunner, answer_to, text_of
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.step_loop import NOT_FINITE
from hybrid.errors import HybridError, RequestError
from hybrid.interrupts import deferred_interrupts
from hybrid.prompts.images import Image, ImagePrompt

MAX_TOKENS = 320
"""Tokens of a prompt, without what is added to a conversation."""

MAX_LIVE = 24
MAX_STREAMS = 4
MAX_STEPS_TO_END = 20_000
"""Steps in which all requests must finish once nothing fails any more."""

IMAGE_LENGTHS = (5, 20, 33)
CAUSES = (NOT_FINITE, "InjectedError", "AlarmError", "OverflowError", "is not pinned")
"""What an output with an error may name."""


@dataclass
class Report:
    """What a stress run did.

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
        """Whether nothing was leaked, lost or wrong."""
        wrong = self.wrong_answers + self.wrong_contents + self.wrong_checkpoints + self.wrong_errors
        return self.leaked + self.lost + self.stuck + wrong + self.trespasses == 0

    def as_json(self) -> dict[str, Any]:
        """The report for machines."""
        fields = asdict(self)
        return {"passed": self.passed, **fields.pop("faults"), **fields}


@dataclass(frozen=True)
class Conversation:
    """Tokens that were asked and answered, and the images among them."""

    ids: list[int]
    images: tuple[Image, ...] = ()

    def cut(self, end: int) -> Conversation:
        """Its first tokens, up to `end`, without a part of an image."""
        end = min([end, *(image.start for image in self.images if image.start < end < image.end)])
        return Conversation(self.ids[:end], tuple(image for image in self.images if image.end <= end))

    @property
    def prompt(self) -> list[int] | ImagePrompt:
        """The conversation as a prompt."""
        return ImagePrompt(self.ids, self.images) if self.images else self.ids


@dataclass(frozen=True)
class Asked:
    """A request as it was made."""

    prompt: Conversation
    params: SamplingParams
    namespace: str


@dataclass(eq=False)
class Stream:
    """An answer that is read piece by piece."""

    asked: Asked
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
        self.rng: random.Random = random.Random(seed)
        elastic = "one budget" if engine.cache.memory.arena is not None else "fixed"
        self.report: Report = Report(seed, str(engine.cache.config.eviction), elastic, faults=faults.counts)
        self._toy = toy
        self._faults = faults
        self._audit_every = audit_every
        self._alarm = alarm
        self._intruder = Intruder(engine, faults)
        self._images = random_images(seed, engine.model.config.hidden_size)
        self._conversations: list[Conversation] = []
        self._live: dict[str, Asked] = {}
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
            with suppress(InjectedError), deferred_interrupts() if is_whole else nullcontext():
                action()

        alarm.interrupt(interruptible)
        if self._faults.counts.interrupts > before and not is_whole:
            self._unsure |= self._live.keys()

    def _audit(self) -> None:
        self.engine.cache.audit()
        self.report.audits += 1

    # Actions

    def _ask(self) -> Asked:
        """A random request: a next turn, a fork of a conversation, or another one."""
        rng, vocab_size, grid = self.rng, self.engine.model.config.vocab_size, self.engine.cache.config.grid
        kind = rng.random() if self._conversations else 1.0
        prompt = Conversation([])
        if kind < 0.4:
            prompt = rng.choice(self._conversations)
            self.report.turns += 1
        elif kind < 0.75:
            prompt = rng.choice(self._conversations)
            prompt = prompt.cut(rng.randrange(len(prompt.ids)))
            self.report.forks += 1
        if len(prompt.ids) > MAX_TOKENS - 4 * grid:
            prompt = Conversation([])
        if rng.random() < 0.1:
            image = rng.choice(self._images)
            image = replace(image, start=len(prompt.ids))
            prompt = Conversation(prompt.ids + [0] * (image.end - image.start), (*prompt.images, image))
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
        return Asked(prompt, params, rng.choice(("", "", "", "other")))

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

    def _answer(self, asked: Asked, count: int) -> list[int]:
        """The right answer to a request, of the toy model."""
        return answer_to(asked.prompt.prompt, count, self.engine.cache.config.page_size)

    def _end(self, output: RequestOutput, asked: Asked) -> None:
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

    def finish(self) -> Report:
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
    return [Image(0, 0.02 * torch.randn(count, hidden_size, generator=generator)) for count in IMAGE_LENGTHS]
