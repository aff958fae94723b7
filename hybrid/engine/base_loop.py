"""What both loops have: the parts of a step, and what holds around every step (docs/architecture.md, "Failures")."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from hybrid.cache.cache import HybridCache
from hybrid.engine.config import EngineConfig
from hybrid.engine.failures import FailureBisector
from hybrid.engine.model_runner import ClosedRunner, LaunchedPass, Runner
from hybrid.engine.request import Request
from hybrid.engine.requests import Requests
from hybrid.engine.results import Result
from hybrid.engine.sampler import NO_TOKEN
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.step import Part, Step
from hybrid.errors import NonFiniteError, RequestError, SamplingError
from hybrid.interrupts import deferred, handlers_allowed, is_for_the_process, was_raised_by_handler

log: logging.Logger = logging.getLogger(__name__)

MAX_IDLE = 0.005
"""Seconds that a step waits for a disk, or for a form, where there is nothing to compute: who runs the steps may do
something else."""

NO_REQUESTS: frozenset[Request] = frozenset()


@dataclass
class ScheduledPass:
    """A step whose pass was launched.

    Attributes:
        step: as it was scheduled.
        forward: its pass.
        started: when it was launched, in seconds.
    """

    step: Step
    forward: LaunchedPass
    started: float


class Loop(ABC):
    """Runs the requests of an engine, step by step.

    Args:
        cache: what requests share.
        scheduler: the requests that wait and run.
        requests: all of them.
        runner: computes the steps.
        config: limits of requests and steps.

    Attributes:
        requests, runner: as given.
        is_retrying: the latest step failed, and its requests are computed again by the next one.
    """

    def __init__(
        self, cache: HybridCache, scheduler: Scheduler, requests: Requests, runner: Runner, config: EngineConfig
    ) -> None:
        self.requests = requests
        self.runner: Runner = runner
        self.is_retrying: bool = False
        self._cache = cache
        self._scheduler = scheduler
        self._config = config
        self._bisector = FailureBisector()
        self._suspects: list[Part] = []  # of the pass that is planned and launched, or that is waited for
        self._latest_results = 0.0
        self._is_closing = False
        cache.on_reset.add(self)

    @abstractmethod
    def step(self) -> None:
        """Schedule, plan, launch, commit, deliver."""

    @abstractmethod
    def forget(self, request: Request | None = None) -> None:
        """Forget what was launched ahead of a request, or of all: they start again, or have ended."""

    def launch(self, after: ScheduledPass | None = None) -> ScheduledPass | None:
        """Schedule a step, plan it, and launch its pass. None if there is nothing to compute now.

        Args:
            after: the pass that is under way.
        """
        scheduler, expected = self._scheduler, NO_REQUESTS
        if after is not None:
            expected = frozenset(part.request for part in after.step.parts if part.samples and not part.is_dropped)
        step = scheduler.schedule(self._bisector.group, expected)
        while scheduler.completed:
            self.requests.end_by_form(scheduler.completed.pop())
        if not step.parts:
            return None
        self._suspects = step.parts
        started = time.perf_counter()
        with handlers_allowed():
            forward = self.runner.launch(self.runner.plan(step, after.forward if after is not None else None))
        scheduler.advance(step)
        return ScheduledPass(step, forward, started)

    def results(self, now: ScheduledPass) -> list[Result]:
        """Wait for the results of a pass, one for each part of its step."""
        self._suspects = now.step.parts
        with handlers_allowed():
            results = now.forward.results()
        self._suspects = []
        ended = time.perf_counter()
        started, self._latest_results = max(now.started, self._latest_results), ended
        if now.step.parts[-1].is_prefill:  # they come first
            self._cache.note_pass(sum(part.end - part.start for part in now.step.parts), ended - started)
        return results

    def finish(self, now: ScheduledPass, results: list[Result]) -> None:
        """Commit and deliver the results of a pass, request by request."""
        scheduler = self._scheduler
        for part, result in zip(now.step.parts, results, strict=True):
            request = scheduler.at_hand = part.request
            if part.is_dropped or request.has_ended:
                continue
            try:
                if self._starts_again(part, result):
                    self.forget(request)
                else:
                    self.requests.take(part, result)
            except (NonFiniteError, SamplingError) as error:
                self.requests.fail(request, error)
        scheduler.at_hand = None
        self.requests.meter.stepped()
        if scheduler.drafting is not None:
            scheduler.drafting.end_step(now.step)
        self._bisector.passed(now.step.parts)

    def _starts_again(self, part: Part, result: Result) -> bool:
        """Tell whether nothing is taken of a part: its request starts again without what is cached, or when it is known
        which token its form allows; or it ends, because its form allows none."""
        request = part.request
        if not result.is_finite:
            return self._scheduler.start_cold(part)
        if NO_TOKEN not in result.tokens:
            return False
        if request.is_complete:
            self.requests.end_by_form(request)
            return True
        if request.constraints is None or not request.constraints.is_held:
            return False
        if part.is_alive:
            self._scheduler.retract(request, "the form of its answer is late")
        return True

    def wait_for_requests(self) -> None:
        """Wait where nothing can be computed now."""
        with handlers_allowed():
            needs_more = self._scheduler.wait(MAX_IDLE)
        if not needs_more:
            self._bisector.passed([])

    # Around a step

    def advance(self) -> None:
        """Run a step as a piece of the cache's bookkeeping. What is expected of a request, `finish` catches; any other
        exception has all that run start again."""
        if self.requests.is_stepping:
            raise RequestError("a step is under way: a signal handler cannot start another one")
        with deferred():
            self.requests.is_stepping, self.is_retrying = True, False
            try:
                with self._cache.bookkeeping():
                    if self._scheduler.drafting is not None:
                        self._scheduler.drafting.begin_step()
                    self.step()
                    if self._config.audit:
                        self._cache.audit()
            except BaseException as error:
                if not self._recover(error):
                    raise
            finally:
                self.requests.is_stepping = False
                self._end_after_step()

    def _recover(self, error: BaseException) -> bool:
        """Retract all requests after an exception. Returns whether it is the failure of one, which ends with it."""
        request, suspects = self._scheduler.at_hand, self._suspects
        self._scheduler.at_hand, self._suspects = None, []
        with self._cache.bookkeeping():
            self.forget()
            self._scheduler.retract_all("a step failed")
            is_culpable = not was_raised_by_handler(error) and not is_for_the_process(error)
            if request is None and suspects and is_culpable:
                request = self._bisector.failed(suspects)
                self.is_retrying = request is None
            if request is not None:
                self.requests.fail(request, error)
            for lease in [*self._cache.leases]:  # no request has one now: the exception came before it had
                self._cache.close(lease)
        return request is not None and not is_for_the_process(error)

    def start_again(self) -> None:
        """Record that the cache was reset: all that run start again."""
        self.forget()
        for request in self._scheduler.running:
            request.lease = None  # it has ended
        self._scheduler.retract_all("the cache was emptied")

    def _end_after_step(self) -> None:
        """Do what was asked while the step was under way."""
        if self._is_closing:
            self.close()
        elif self.requests.aborted:
            with self._cache.bookkeeping():
                self.requests.end_aborted()

    def work(self) -> None:
        """Run a step on behalf of some requests. If it fails, further steps find the request that is the reason."""
        try:
            self.advance()
        except Exception:
            if not self.is_retrying:
                raise
            log.warning("a step failed, and its requests are computed again", exc_info=True)

    def replay_while_idle(self) -> None:
        """Replay answers, as long as there is no other work."""
        while not self.requests.by_id and self._scheduler.has_work:
            self.work()

    def close(self) -> None:
        """Abort all requests, forget replays and the model, and free the memory of the cache: now, or at the end of the
        step that is under way."""
        with deferred():
            self._is_closing = self.requests.is_stepping  # called by a signal handler, or a function of a request
            if self._is_closing:
                return
            try:
                with self._cache.bookkeeping():
                    self.requests.close()
                    self.forget()
                    self.runner = ClosedRunner()
                    while self._cache.expire_next_pin():
                        pass
                    self._cache.shutdown()
            finally:
                self._cache.memory.release()
