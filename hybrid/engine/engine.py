"""The engine: prompts in, text out, the prefix cache in between."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.pins import Pin
from hybrid.engine.build import LoadedModel, build_cache, is_deterministic, load
from hybrid.engine.config import EngineConfig
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.guard import StepGuard
from hybrid.engine.intake import Intake
from hybrid.engine.model_runner import ModelRunner, Result, Runner
from hybrid.engine.output import Outputs, RequestOutput
from hybrid.engine.request import Request, Status
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.scheduler import Part, Scheduler, Step
from hybrid.engine.suspects import Suspects
from hybrid.errors import ArgumentError, HybridError, NonFiniteError, PromptError, QueueFullError, RequestError
from hybrid.interrupts import deferred_interrupts
from hybrid.prompts.encode import Prompt, as_prompts
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.speculator import Speculator, make_speculator

log: logging.Logger = logging.getLogger(__name__)

NOT_FINITE = "the model computed NaN or infinity for this request; nothing of the pass was cached"


class Engine:
    """A hybrid model with its prefix cache.

    Use `from_pretrained`. One thread owns an engine: the one that owns its cache.

    Args:
        loaded: the model and what belongs to it.
        cache: an empty cache for the model.
        config: limits of requests and steps.
        runner: computes the steps; None: a `ModelRunner` with the model.
        speculation: how tokens are drafted, as in `from_pretrained`.

    Attributes:
        loaded: the model, its tokenizer, and its defaults.
        cache: `stats()`, `audit()`, `clear()`.
        config: as given.
        deterministic: the outputs of hits are bitwise those of cold runs.
        scheduler: the requests that wait and run.
        runner: computes the steps.
        speculation: how tokens are drafted; None: they are not.
        speculator: drafts them, and has the `stats` of each drafter.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: HybridCache,
        config: EngineConfig | None = None,
        *,
        runner: Runner | None = None,
        speculation: SpeculationConfig | str | None = None,
    ) -> None:
        self.loaded = loaded
        self.cache = cache
        self.config: EngineConfig = config or EngineConfig()
        self.config.require_chunk(cache.config.chunk_size)
        self.deterministic: bool = is_deterministic(cache.config, loaded.device)
        self.speculation: SpeculationConfig | None = SpeculationConfig.of(speculation)
        self.speculator: Speculator | None = make_speculator(self.speculation, cache, loaded.model.config.vocab_size)
        self.scheduler: Scheduler = Scheduler(cache, self.config, self.deterministic, self.speculator)
        self.runner: Runner = runner or self._model_runner()
        # without a device of its own, nothing is computed while the next step is scheduled
        self._overlap = loaded.device.type == "cuda" if self.config.overlap is None else self.config.overlap
        self._ahead: Step | None = None
        self._intake = Intake(loaded, cache)
        self._requests: dict[str, Request] = {}
        self._outputs = Outputs()
        self._suspects = Suspects()
        self._is_stepping = False
        self._is_retried = False  # the latest failure was one of a pass, whose requests are computed again
        self._aborted: list[Request] = []

    def _model_runner(self) -> ModelRunner:
        model, device = self.loaded.model, self.loaded.device
        if self.deterministic:
            model.make_batch_invariant()
        graphs = None
        if device.type == "cuda" and not self.config.enforce_eager and model.decode_can_be_recorded:
            graphs = DecodeGraphs(model, self.cache.kv, self.cache.state_tensors, device)
        return ModelRunner(model, self.cache, device, self.deterministic, graphs, self.loaded.end_tokens)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        cache: CacheConfig | None = None,
        config: EngineConfig | None = None,
        speculation: SpeculationConfig | str | None = None,
    ) -> Engine:
        """Load a checkpoint with its tokenizer, and allocate its cache.

        Args:
            model: a folder, a hub id, or "tiny" for the small model inside the package.
            device: "cuda", "cpu", ...; None: a GPU if there is one.
            dtype: "float32", "bfloat16" or "float16"; None: the checkpoint's on a GPU, float32 on a CPU.
            cache: settings of the cache.
            config: settings of the engine.
            speculation: draft tokens, so that a pass may yield several; the answers are the same. "cache" (what comes
                next where it was cached), or a `SpeculationConfig`; None: nothing is drafted.

        Raises:
            CheckpointError: there is no usable checkpoint.
            MemoryBudgetError: the cache's memory does not suffice.
            ArgumentError: another argument is wrong.
        """
        settings = cache or CacheConfig()
        loaded = load(model, device, dtype, settings.chunk_size)
        return cls(loaded, build_cache(loaded, settings), config, speculation=speculation)

    def with_cache(
        self,
        cache: CacheConfig,
        size: tuple[int, int] | None = None,
        *,
        config: EngineConfig | None = None,
        speculation: SpeculationConfig | str | None = None,
    ) -> Engine:
        """Another engine on the same weights, with a cache of its own.

        Args:
            cache: its settings. `chunk_size` must be this engine's: the model was loaded with it.
            size: numbers of pages and of state slots of the cache, instead of `cache.memory`.
            config: settings of the engine; None: this engine's.
            speculation: as in `from_pretrained`.

        Raises:
            ArgumentError: another chunk size.
            MemoryBudgetError: the memory does not suffice.
        """
        if cache.chunk_size != self.cache.config.chunk_size:
            raise ArgumentError(
                f"with_cache: chunk_size must stay {self.cache.config.chunk_size}, got {cache.chunk_size}"
            )
        made = build_cache(self.loaded, cache, size)
        return Engine(self.loaded, made, config or self.config, speculation=speculation)

    @property
    def model(self) -> Any:
        """The model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, of transformers; None: prompts are token ids."""
        return self.loaded.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.loaded.device

    @property
    def default_params(self) -> SamplingParams:
        """From `generation_config.json`; used where a call gives no `SamplingParams`."""
        return self.loaded.default_params

    # A step

    def _advance(self) -> None:
        """One step: schedule, plan, launch, commit, deliver.

        With overlap the next step is scheduled while the device computes this one. Until the results are there, a
        failure undoes the step for all its requests (`_guard`); after that it ends one request.
        """
        with self._guard() as guard:
            step = guard.undo_on_failure(self._schedule())
            if not step.parts:
                self._suspects.passed([])
                return
            started = time.perf_counter()
            with guard.interruptible():
                plan = self.runner.plan(step)
                pending = self.runner.launch(plan)
            parts = self.scheduler.advance(step)
            if self._overlap and self._suspects.group is None and self.scheduler.speculator is None:
                self._ahead = guard.undo_on_failure(self.scheduler.schedule())
            with guard.interruptible():
                results = dict(zip(map(id, step.parts), pending.wait(), strict=True))
            guard.keep_on_failure()
            if self.speculator is not None and not any(part.is_prefill for part in step.parts):
                self.speculator.timed(sum(part.num_rows for part in step.parts), time.perf_counter() - started)
            for part in parts:
                if part.request.status is Status.FINISHED:  # it failed while the next step was scheduled
                    continue
                with guard.failing(part.request):
                    self._take(part, results[id(part)])
                    self._deliver(part, results[id(part)])
            self._suspects.passed([part.request for part in parts])

    def _schedule(self) -> Step:
        """The parts of the step scheduled ahead whose requests still run, or else a step scheduled now."""
        ahead, self._ahead = self._ahead, None
        step = ahead.alive() if ahead is not None else Step([])
        return step if step.parts else self.scheduler.schedule(self._suspects.group)

    def _take(self, part: Part, result: Result) -> None:
        """Append the tokens of a part to its request, up to its end, and share what was computed of them."""
        request = part.request
        if not result.is_finite:
            raise NonFiniteError(NOT_FINITE)
        self.scheduler.accept(part, result.num_accepted)
        for at, token in enumerate(result.tokens):
            if request.finish_reason is None:
                request.append(token, result.logprobs[at] if result.logprobs else None, self.loaded.end_tokens)
        if part.is_alive:  # otherwise it was retracted while it was computed
            self.scheduler.commit(part)

    def _deliver(self, part: Part, result: Result) -> None:
        """Give the output of a part to its consumer."""
        request = part.request
        if not result.tokens:
            return
        if request.finish_reason is not None:
            self.scheduler.finish(request)
            self._requests.pop(request.request_id, None)
        request.outputs.put(request.output())

    @contextmanager
    def _guard(self) -> Iterator[StepGuard]:
        """What holds around every step, however it ends.

        * Signal handlers wait, except where `StepGuard.interruptible` lets them run.
        * When the step fails before its results are there, its requests, and those of the step scheduled ahead, start
          again from what they have committed. A request that makes steps fail again and again ends with an error.
        * Requests that failed by themselves end with an error, and those that were aborted meanwhile are aborted.
        """
        self.cache.check_owner()
        if self._is_stepping:
            raise RequestError("a step is under way: a signal handler cannot start another one")
        with deferred_interrupts() as interrupts:
            guard = StepGuard(interrupts)
            self._is_stepping = True
            try:
                yield guard
                if self.config.audit:
                    self.cache.audit()
            except BaseException as error:
                if not self._undo(guard, error):
                    raise
            finally:
                self._is_stepping = False
                for request, failure in (*self.scheduler.take_failures(), *guard.failures):
                    self._fail(request, failure)
                aborted, self._aborted = self._aborted, []
                for request in aborted:
                    self._end_aborted(request)
            guard.raise_pending()

    def _undo(self, guard: StepGuard, error: BaseException) -> bool:
        """Undo steps that failed. Returns whether the failure is that of one request, which ends with it."""
        self._is_retried = False
        if not guard.steps:
            return False
        self._ahead = None
        self.scheduler.roll_back(*guard.steps)
        if isinstance(error, Exception) and not guard.was_interrupted:
            self._is_retried = True
            culprit = self._suspects.failed([part.request for part in guard.steps[0].parts])
            if culprit is not None:
                self._fail(culprit, error)
                return True
        return False

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error."""
        if request.error is not None:
            return
        request.finish_reason = "error"
        request.error = str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"
        log.warning("%s ends with an error: %s", request.request_id, request.error)
        self._requests.pop(request.request_id, None)
        request.outputs.put(request.output())
        self.scheduler.discard(request)

    # Answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts together.

        Args:
            prompts: one or more of: a text, a list of token ids, a list of chat messages `{"role": ..., "content":
                ...}` (or `{"messages": [...]}`), whose contents may hold images, an `ImagePrompt`.
            params: for all of them, or one for each; None: `default_params`.
            namespace: prompts share what is cached only within a namespace.
            progress: show a progress bar; None: when there is a terminal.

        Returns:
            One result per prompt, in order. A request that failed has `finish_reason="error"`; the others are not
            affected.

        Raises:
            PromptError: a prompt cannot be run. None was started.
            MemoryBudgetError: a prompt and its answer do not fit into the cache's memory.
            QueueFullError: more prompts than may wait.
        """
        many = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise ArgumentError(
                f"{len(each)} SamplingParams for {len(many)} prompts; give one for all, or one for each"
            )
        outputs = Outputs()
        requests = [self._intake.request(prompt, p, namespace, outputs) for prompt, p in zip(many, each, strict=True)]
        done: dict[str, RequestOutput] = {}
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        with self._aborting(requests), tqdm(total=len(many), desc="generate", unit="prompt", disable=hidden) as bar:
            self._enter(requests)
            while len(done) < len(requests):
                if not outputs:
                    self._work()
                finished = [output for output in outputs.take() if output.finish_reason is not None]
                done.update({output.request_id: output for output in finished})
                bar.update(len(finished))
            self._replay_while_idle()
        return [done[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: str = "") -> Iterator[str]:
        """Answer one prompt, piece by piece. Closing the iterator early aborts the request.

        Other requests may be run between two pieces; nothing of the stream is lost.

        Raises:
            PromptError: there is no tokenizer, or the prompt cannot be run.
            RequestError: the request failed; raised after the text that it had.
        """
        if self.tokenizer is None:
            raise PromptError("this checkpoint has no tokenizer; use add_request and step for token ids")
        return self._stream(self._intake.request(prompt, params, namespace, Outputs()))

    def _stream(self, request: Request) -> Iterator[str]:
        sent, ended = 0, False
        with self._aborting([request]):
            self._enter([request])
            while not ended:
                if not request.outputs:
                    self._work()
                for output in request.outputs.take():
                    ended = output.finish_reason is not None
                    start, sent = sent, max(sent, len(output.text))
                    if sent > start:
                        yield output.text[start:]
            self._replay_while_idle()
        if request.error is not None:
            raise RequestError(f"{request.request_id} failed: {request.error}")

    @contextmanager
    def _aborting(self, requests: list[Request]) -> Iterator[None]:
        """Abort requests that still run when this is left: by an exception, or because a stream was closed."""
        try:
            yield
        finally:
            with deferred_interrupts():
                for request in requests:
                    if request.request_id in self._requests:
                        self.abort(request.request_id)

    def _work(self) -> None:
        """A step on behalf of some requests. If it fails, further steps find the request that is the reason."""
        try:
            self._advance()
        except Exception:
            if not self._is_retried:
                raise
            log.warning("a step failed, and its requests are computed again", exc_info=True)

    def _replay_while_idle(self) -> None:
        """Replay answers, as long as there is no other work."""
        while not self._requests and self.scheduler.has_work:
            self._work()

    # Step by step

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: a request waits or runs, or an output was not returned yet."""
        return self.scheduler.has_work or bool(self._outputs)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: str = "") -> str:
        """Queue a prompt, and return its id. `step` runs it.

        Raises:
            PromptError: the prompt cannot be run.
            MemoryBudgetError: prompt and answer do not fit into the cache's memory.
            QueueFullError: `EngineConfig.max_waiting` requests wait already.
            OwnershipError: another thread owns the engine.
        """
        request = self._intake.request(prompt, params, namespace, self._outputs)
        self._enter([request])
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step: a token for every request that decodes, and a share of the prompts.

        Returns:
            Outputs of requests of `add_request`: those that have a new token, or ended. Nothing is lost when a step
            raises: outputs are returned by the next one.

        Raises:
            RequestError: there is no work.
            Exception: the pass failed. Its requests are computed again by the next step; one that makes steps fail
                again and again ends with `finish_reason="error"`.
        """
        if not self.has_work:
            raise RequestError("there is nothing to do: add_request first, and step while has_work")
        if self.scheduler.has_work:
            self._advance()
        return self._outputs.take()

    def abort(self, request_id: str) -> None:
        """Stop a request. Its last output has `finish_reason="abort"`. What it has committed stays cached.

        Raises:
            RequestError: there is no such request, or it has ended.
            OwnershipError: another thread owns the engine.
        """
        self.cache.check_owner()
        with deferred_interrupts():
            request = self._requests.pop(request_id, None)
            if request is None:
                raise RequestError(f"no request {request_id!r} is waiting or running")
            if self._is_stepping:  # called by a signal handler, or when a stream is collected
                self._aborted.append(request)
            else:
                self._end_aborted(request)

    def _end_aborted(self, request: Request) -> None:
        if request.status is not Status.FINISHED:
            request.finish_reason = "abort"
            request.outputs.put(request.output())
            self.scheduler.discard(request)

    def _enter(self, requests: list[Request]) -> None:
        """Queue requests: all, or none."""
        self.cache.check_owner()
        limit, waiting = self.config.max_waiting, self.scheduler.waiting.num_requests
        if limit is not None and waiting + len(requests) > limit:
            raise QueueFullError(f"{waiting} requests wait, and {len(requests)} more are too many: max_waiting={limit}")
        with deferred_interrupts():
            for request in requests:
                self._requests[request.request_id] = request
                self.scheduler.waiting.add(request)

    # Pins

    def pin(self, prompt: Prompt, ttl: float = math.inf, *, namespace: str = "") -> Pin:
        """Keep what is cached of a prompt from eviction.

        Args:
            ttl: seconds until the pin expires.

        Raises:
            ArgumentError: `ttl` is not a positive number.
            PromptError: nothing of the prompt is cached.
            MemoryBudgetError: more than half of the memory would be pinned.
        """
        key = self._intake.encode(prompt).key(namespace)
        with deferred_interrupts():
            pin = self.cache.pin(key, ttl)
        if pin is None:
            raise PromptError("nothing of this prompt is cached; generate with it first, or give pin_for with it")
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release a pin. One that was released before stays so."""
        with deferred_interrupts():
            self.cache.unpin(pin)
