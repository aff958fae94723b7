"""The steps of an engine: what is scheduled, computed, committed and delivered, and what holds when that fails."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

from hybrid.cache.cache import HybridCache
from hybrid.engine.config import EngineConfig
from hybrid.engine.failures import FailureBisector, Recovery, StepGuard
from hybrid.engine.model_runner import ClosedRunner, LaunchedPass, Runner
from hybrid.engine.request import Request
from hybrid.engine.results import Result
from hybrid.engine.sampler import NO_TOKEN
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.stats import EngineStats, Meter
from hybrid.engine.step import BrokenOffError, Part, Step
from hybrid.errors import (
    AuditError,
    ClosedError,
    HybridError,
    NonFiniteError,
    OwnershipError,
    QueueFullError,
    RequestError,
    SamplingError,
)
from hybrid.interrupts import deferred, is_for_the_process

log: logging.Logger = logging.getLogger(__name__)

NO_TOKEN_LEFT = "no token can be chosen: the parameters exclude all, or a logits processor gave NaN"

NOT_FINITE = "the model computed NaN or infinity for this request; nothing of the pass was cached"


MAX_IDLE = 0.005
"""Seconds that a step waits for a disk, or for a form, where there is nothing to compute: who runs the steps may do
something else."""

NO_ONE: frozenset[Request] = frozenset()


@dataclass
class ScheduledPass:
    """A step whose pass was launched.

    Attributes:
        step: as it was scheduled.
        parts: those whose results are taken.
        forward: its pass.
        started: when it was launched, in seconds.
    """

    step: Step
    parts: list[Part]
    forward: LaunchedPass
    started: float

    def drop_late(self, requests: Set[Request], scheduler: Scheduler) -> None:
        """Drop the parts of requests whose tokens the device did not know: they are computed again. One that was
        retracted meanwhile begins again with tokens that are known."""
        for part in self.parts:
            if part.num_unknown and part.request in requests:
                scheduler.retreat(part)
        self.parts = [part for part in self.parts if not part.num_unknown or part.request not in requests]


def queue_full(num_waiting: int, num_more: int, config: EngineConfig) -> QueueFullError:
    """The refusal of requests for which there is no room.

    Args:
        num_waiting: requests that wait.
        num_more: requests that are refused.
    """
    return QueueFullError(
        f"{num_waiting} requests wait, and {num_more} more are too many: max_waiting={config.max_waiting} beside the "
        f"max_num_seqs={config.max_num_seqs} that run; try again later"
    )


def tenant_full(tenant: str, num_requests: int, config: EngineConfig) -> QueueFullError | None:
    """The refusal of requests of a tenant that has as many as it may have; None: it may have these.

    Args:
        num_requests: that it would have.
    """
    own = config.tenants.get(tenant)
    if own is None or own.max_requests is None or num_requests <= own.max_requests:
        return None
    return QueueFullError(
        f"{tenant!r} would have {num_requests} requests: TenantConfig(max_requests={own.max_requests}); "
        "send it when others of it have ended"
    )


class StepLoop(ABC):
    """Runs the requests of an engine, step by step: what both loops have, and what holds when a step fails. The
    steps themselves are those of `PlainLoop` and `OverlapLoop` below.

    Args:
        cache: what requests share.
        scheduler: the requests that wait and run.
        runner: computes the steps.
        config: limits of requests and steps.
        end_tokens: tokens that end an answer.

    Attributes:
        runner: as given.
        requests: those that wait or run, by id; without replays.
        num_requests_of: the number of them by tenant.
        meter: counts what was delivered.
        is_retrying: the latest step failed, and its requests are computed again by the next one.
    """

    def __init__(
        self,
        cache: HybridCache,
        scheduler: Scheduler,
        runner: Runner,
        config: EngineConfig,
        end_tokens: frozenset[int],
    ) -> None:
        self.runner: Runner = runner
        self.requests: dict[str, Request] = {}
        self.num_requests_of: Counter[str] = Counter()
        self.meter: Meter = Meter()
        self.is_retrying: bool = False
        self._cache = cache
        self._scheduler = scheduler
        self._config = config
        self._end_tokens = end_tokens
        self._latest_results = 0.0
        self._bisector = FailureBisector()
        self._recovery = Recovery(cache, scheduler, self.requests)
        self._is_stepping = False
        self._aborted: deque[Request] = deque()
        self._is_closing = False
        self._was_emptied = False  # the latest step failed, and left the cache inconsistent

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        scheduler, meter = self._scheduler, self.meter
        running = list(scheduler.running)
        replays = sum(request.is_replay for request in running)
        bytes_total, bytes_free = self._cache.memory.num_bytes
        return EngineStats(
            waiting=scheduler.waiting.num_requests,
            running=len(running) - replays,
            restoring=len(scheduler.restoring),
            replays=replays + scheduler.waiting.num_replays,
            retractions=scheduler.num_retractions,
            finished=dict(meter.finished),
            prompt_tokens=meter.prompt_tokens,
            completion_tokens=meter.completion_tokens,
            tokens_per_second=meter.tokens_per_second(),
            bytes_total=bytes_total,
            bytes_free=bytes_free,
            time_to_first_token=meter.first_token.histogram(),
            time_between_tokens=meter.between_tokens.histogram(),
            speculation=scheduler.drafting.stats if scheduler.drafting is not None else {},
        )

    def enter(self, requests: list[Request], *, has_room: bool = False) -> None:
        """Queue requests: all, or none.

        Args:
            has_room: the limits of what waits are not looked at.

        Raises:
            QueueFullError: more than may wait.
            ClosedError: a signal handler has closed the engine meanwhile.
        """
        if not has_room:
            self._check_room(requests)
        with deferred():
            if isinstance(self.runner, ClosedRunner):
                raise ClosedError("this engine was closed")
            try:
                for request in requests:
                    self.requests[request.request_id] = request
                    self.num_requests_of[request.tenant] += 1
                    self._scheduler.add(request)
            except BaseException as error:
                for request in requests:
                    self._remove(request.request_id)
                    self._discard(request)
                self._reset_if_inconsistent(error)
                raise

    def _check_room(self, requests: list[Request]) -> None:
        room = self._scheduler.room
        if room is not None and len(requests) > room:
            raise queue_full(self._scheduler.waiting.num_requests, len(requests), self._config)
        for tenant, num_more in Counter(request.tenant for request in requests).items():
            if (refusal := tenant_full(tenant, self.num_requests_of[tenant] + num_more, self._config)) is not None:
                raise refusal

    def _remove(self, request_id: str) -> Request | None:
        """Count a request no more that has ended, or could not be queued. None: there is none."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.num_requests_of[request.tenant] -= 1
            if not self.num_requests_of[request.tenant]:
                del self.num_requests_of[request.tenant]
        return request

    @contextmanager
    def aborting(self, requests: list[Request]) -> Iterator[None]:
        """Abort requests that still run when this is left: by an exception, or because a stream was closed, or
        collected, in whatever thread."""
        try:
            yield
        finally:
            with deferred():
                for request in requests:
                    if request.request_id in self.requests:
                        try:
                            self._cache.check_owner()
                            self.abort(request.request_id)
                        except OwnershipError:
                            self.abort_later(request)

    def abort(self, request_id: str) -> None:
        """Stop a request: now, or at the end of the step that is under way.

        Raises:
            RequestError: there is no such request, or it has ended.
        """
        with deferred():
            request = self._remove(request_id)
            if request is None:
                raise RequestError(f"no request {request_id!r} is waiting or running")
            if self._is_stepping:  # called by a signal handler, or when a stream is collected
                self._aborted.append(request)
            else:
                self._end_aborted(request)

    def abort_later(self, request: Request) -> None:
        """Stop a request at the end of the next step, if it has not ended then. From any thread."""
        self._aborted.append(request)

    def close(self) -> None:
        """Abort all requests, forget replays and the model, and free the memory of the cache: now, or at the end of the
        step that is under way."""
        with deferred():
            self._is_closing = self._is_stepping  # called by a signal handler, or a function that belongs to a request
            if self._is_closing:
                return
            try:
                for request_id in list(self.requests):
                    self.abort(request_id)
                for replay in [*self._scheduler.running, *self._scheduler.waiting.in_turn(set())]:
                    self._scheduler.discard(replay)
                self.forget()
                self.runner = ClosedRunner()
                while self._cache.expire_next_pin():
                    pass
                self._cache.shutdown()
            finally:
                self._cache.memory.release()

    def work(self) -> None:
        """A step on behalf of some requests. If it fails, further steps find the request that is the reason."""
        try:
            self.advance()
        except Exception:
            if not self.is_retrying:
                raise
            log.warning("a step failed, and its requests are computed again", exc_info=True)

    def replay_while_idle(self) -> None:
        """Replay answers, as long as there is no other work."""
        while not self.requests and self._scheduler.has_work:
            self.work()

    def advance(self) -> None:
        """One step. Until its results are there, a failure undoes it for all its requests (`_guard`); after that it
        ends one request."""
        with self._guard() as guard:
            if self._scheduler.drafting is not None:
                self._scheduler.drafting.begin()
            self.step(guard)

    @abstractmethod
    def step(self, guard: StepGuard) -> None:
        """Schedule, plan, launch, commit, deliver."""

    @abstractmethod
    def forget(self, request: Request | None = None) -> None:
        """Forget what was launched ahead of a request, or of all: they start again, or have ended."""

    def _launch(self, guard: StepGuard, before: ScheduledPass | None = None) -> ScheduledPass | None:
        """Schedule a step, plan it, and launch it after the one that is under way. None: there is nothing to compute
        now."""
        expected = frozenset(part.request for part in before.parts if part.samples) if before is not None else NO_ONE
        try:
            step = self._scheduler.schedule(self._bisector.group, expected)
        except BrokenOffError as broken:
            if broken.__cause__ is None or not self._reset_if_inconsistent(broken.__cause__):
                self._scheduler.retract_all()
            return None
        for request in self._scheduler.take_completed():
            self._end_by_form(request)
        if not step.parts:
            return None
        guard.undo_on_failure(step)
        started = time.perf_counter()
        with guard.interruptible():
            forward = self.runner.launch(self.runner.plan(step, before.forward if before is not None else None))
        return ScheduledPass(step, self._scheduler.advance(step), forward, started)

    def _wait_for_requests(self, guard: StepGuard) -> None:
        """Nothing can be computed now."""
        with guard.interruptible():
            needs_more = self._scheduler.wait(MAX_IDLE)
        if not needs_more:
            self._bisector.passed([])

    def _wait(self, guard: StepGuard, launched: ScheduledPass) -> dict[int, Result]:
        """The results of a step, by `id` of the part. From now on it is not undone."""
        with guard.interruptible():
            results = dict(zip(map(id, launched.step.parts), launched.forward.results(), strict=True))
        guard.keep_on_failure(launched.step)
        self._note_time(launched)
        return results

    def _finish(self, guard: StepGuard, launched: ScheduledPass, results: Mapping[int, Result]) -> None:
        """Commit and deliver the results of a step, request by request."""
        for part in launched.parts:
            if part.request.has_ended:  # it failed while the next step was scheduled, or ended
                continue
            try:
                if not results[id(part)].is_finite and self._start_cold(part):
                    continue
                if NO_TOKEN in results[id(part)].tokens and self._hold(part):
                    continue
                self._take(part, results[id(part)])
                self._deliver(part, results[id(part)])
            except BaseException as error:
                guard.failed(part.request, error)
                self._reset_if_inconsistent(error)
        self._was_emptied = False
        self.meter.stepped()
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.timed(launched.step)
        self._bisector.passed(launched.parts)

    def _note_time(self, launched: ScheduledPass) -> None:
        """The results of a step are there."""
        now = time.perf_counter()
        started, self._latest_results = max(launched.started, self._latest_results), now
        if all(part.is_prefill for part in launched.step.parts):
            self._cache.note_pass(sum(part.end - part.start for part in launched.step.parts), now - started)

    def _start_cold(self, part: Part) -> bool:
        """See `Scheduler.start_cold`. What was launched ahead of its request is of no use then."""
        if not self._scheduler.start_cold(part):
            return False
        self.forget(part.request)
        return True

    def _hold(self, part: Part) -> bool:
        """A token could not be chosen because its form allows none, and the answer is complete; or because it was not
        known what it allows, and the request starts again when it is. False: that is not the reason."""
        request = part.request
        if request.is_complete:
            self._end_by_form(request)
            return True
        if request.constraints is None or not request.constraints.is_held:
            return False
        self._scheduler.roll_back(Step([part]))
        self.forget(request)
        return True

    def _end_by_form(self, request: Request) -> None:
        """End a request whose form lets nothing follow its answer, or that has waited for its form at its limit."""
        request.end_by_form()
        self._scheduler.finish(request)
        self._end(request)
        request.outputs.put(request.source)

    def _take(self, part: Part, result: Result) -> None:
        """Append the tokens of a part to its request, up to its end, and share what was computed of them."""
        request = part.request
        if not result.is_finite:
            raise NonFiniteError(NOT_FINITE)
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.accept(part, result.accepted)
        if result.tokens and request.max_len == request.prompt_len:
            request.end_at_prompt()
        for at, token in enumerate(result.tokens):
            if request.finish_reason is not None or request.is_full:
                request.num_accepted -= result.num_more - at  # these drafts are after the end
                break
            if token == NO_TOKEN:
                if request.is_complete:  # with the last draft
                    request.end_by_form()
                    break
                raise SamplingError(request.why_no_token or NO_TOKEN_LEFT)
            before = request.last_token_at
            request.append(token, result.logprobs[at] if result.logprobs else None, self._end_tokens)
            self.meter.delivered(request, before)
        request.add_prompt_logprobs(result.prompt_logprobs, part.end)
        if part.is_alive:  # otherwise it was retracted while it was computed
            self._scheduler.commit(part, part.end + result.num_more)
        for fork, (token, logprobs) in zip(request.forks, result.forks, strict=True) if result.forks else ():
            self._fork(request, fork, token, logprobs)

    def _fork(self, request: Request, fork: Request, token: int, logprobs: dict[int, float] | None) -> None:
        """Start another answer to the prompt of a request, with its first token. What fails is its own failure."""
        try:
            if token == NO_TOKEN:
                raise SamplingError(fork.why_no_token or NO_TOKEN_LEFT)
            fork.append(token, logprobs, self._end_tokens)
            self.meter.forked()
            if fork.finish_reason is None:
                self._scheduler.fork(request, fork)
            else:
                fork.is_fork = False
                self._end(fork)
        except Exception as error:
            fork.is_fork = False
            self._fail(fork, error)

    def _deliver(self, part: Part, result: Result) -> None:
        """Give the output of a part to its consumer."""
        request = part.request
        if not result.tokens:
            return
        if request.finish_reason is not None:
            self._scheduler.finish(request)
            self._end(request)
        request.outputs.put(request.source)

    @contextmanager
    def _guard(self) -> Iterator[StepGuard]:
        """What holds around every step, however it ends.

        * Signal handlers wait, except where `StepGuard.interruptible` lets them run.
        * When the step fails before its results are there, its requests, and those of a step launched ahead, start
          again from what they have committed. A request that makes steps fail again and again ends with an error.
        * Requests that failed by themselves end with an error, and those that were aborted meanwhile are aborted.
        """
        if self._is_stepping:
            raise RequestError("a step is under way: a signal handler cannot start another one")
        with deferred() as section:
            guard = StepGuard(section)
            if self._recovery.complete():
                self.forget()
            self._is_stepping = True
            self.is_retrying = False
            try:
                yield guard
                if self._config.audit:
                    self._cache.audit()
            except BaseException as error:
                if not self._undo(guard, error):
                    raise
            finally:
                self._is_stepping = False
                for request, failure in (*self._scheduler.take_failures(), *guard.failures):
                    self._fail(request, failure)
                while self._aborted:
                    self._end_aborted(self._aborted.popleft())
                if self._is_closing:
                    self.close()
            guard.raise_pending()

    def _undo(self, guard: StepGuard, error: BaseException) -> bool:
        """Undo steps that failed. Returns whether the failure is that of one request, which ends with it."""
        was_emptied, self._was_emptied = self._was_emptied, self._reset_if_inconsistent(error)
        self.is_retrying = self._was_emptied and not was_emptied and not isinstance(error, AuditError)
        if not guard.steps:
            return False
        self.forget()
        try:
            self._scheduler.roll_back(*guard.steps)
        except Exception as failure:
            log.warning("a step that failed could not be undone", exc_info=True)
            self._reset_if_inconsistent(failure)
        if not is_for_the_process(error) and not guard.was_interrupted:
            self.is_retrying = True
            culprit = self._bisector.failed(guard.steps[0].parts)
            if culprit is not None:
                self.is_retrying = False
                self._fail(culprit, error)
                return True
        return False

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error."""
        if request.error is not None:
            return
        self._reset_if_inconsistent(error)
        request.finish_reason = "error"
        if isinstance(error, HybridError):
            request.error, request.error_code = str(error), error.code
        else:
            request.error, request.error_code = f"{type(error).__name__}: {error}", "internal"
        log.warning("%s ends with an error: %s", request.request_id, request.error)
        self._discard(request)
        for fork in request.forks:  # their prompt was not computed
            fork.is_fork, fork.finish_reason, fork.error = False, "error", request.error
            fork.error_code = request.error_code
        self._end(request)
        request.outputs.put(request.source)

    def _discard(self, request: Request) -> None:
        """Take its memory from a request that has ended."""
        try:
            self._scheduler.discard(request)
        except Exception as error:
            log.exception("the memory of %s could not be given back", request.request_id)
            self._reset_if_inconsistent(error)

    def _reset_if_inconsistent(self, error: BaseException) -> bool:
        """Where an exception has left the cache inconsistent, empty it, and have all requests start again. Returns
        whether that was so."""
        was_emptied = self._recovery.reset_if_inconsistent(error)
        if was_emptied:
            self.forget()
        return was_emptied

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Around what changes the cache between steps: signal handlers wait, and an exception leaves it consistent."""
        with deferred():
            try:
                yield
            except Exception as error:
                self._reset_if_inconsistent(error)
                raise

    def _end_aborted(self, request: Request) -> None:
        running = [answer for answer in request.answers if not answer.has_ended]
        for answer in running:
            answer.finish_reason = "abort"
            answer.is_fork = False
            self._discard(answer)
        if running:
            self._end(request)
            request.outputs.put(request.source)

    def _end(self, request: Request) -> None:
        """A request has its finish reason. With several answers it has ended when all of them have."""
        now = time.perf_counter()
        for answer in request.answers:
            if answer.finish_reason is not None and answer.ended_at is None:
                answer.ended_at = now
                if answer.constraints is not None:
                    answer.constraints.end()
        if not request.is_replay and all(answer.finish_reason is not None for answer in request.answers):
            self._remove(request.answers[0].request_id)
            self.meter.ended(request.finish_reason or "")


class PlainLoop(StepLoop):
    """One step after the other: the specification, whose outputs every loop has."""

    def step(self, guard: StepGuard) -> None:
        """Schedule, plan and launch; wait; commit and deliver."""
        launched = self._launch(guard)
        if launched is None:
            self._wait_for_requests(guard)
            return
        results = self._wait(guard, launched)
        self._finish(guard, launched, results)

    def forget(self, request: Request | None = None) -> None:
        """Do nothing: nothing is launched ahead."""


class OverlapLoop(StepLoop):
    """Launches the next step before the results of this one are waited for: its pass takes the tokens on the device. A
    launch ahead that fails is a failure of that step alone.

    Args:
        always: launch ahead in every case. Otherwise only where other threads compute this step, unless the next
            may have prompts, which no other thread computes.
        cache, scheduler, runner, config, end_tokens: those of every loop.
    """

    def __init__(
        self,
        cache: HybridCache,
        scheduler: Scheduler,
        runner: Runner,
        config: EngineConfig,
        end_tokens: frozenset[int],
        *,
        always: bool,
    ) -> None:
        super().__init__(cache, scheduler, runner, config, end_tokens)
        self._always = always
        self._next: ScheduledPass | None = None

    def step(self, guard: StepGuard) -> None:
        """Schedule, plan and launch, unless it was launched ahead; launch the next one; wait; commit and deliver."""
        launched = self._launched_ahead(guard) or self._launch(guard)
        if launched is None:
            self._wait_for_requests(guard)
            return
        failure = self._launch_next(guard, launched)
        results = self._wait(guard, launched)
        if self._next is not None:
            late = {part.request for part in launched.parts if results[id(part)].is_late}
            self._next.drop_late(late, self._scheduler)
        self._finish(guard, launched, results)
        if failure is not None:
            raise failure

    def forget(self, request: Request | None = None) -> None:
        """Forget the step that was launched ahead, or the part of a request."""
        if request is None:
            self._next = None
        elif self._next is not None:
            self._next.parts = [part for part in self._next.parts if part.request is not request]

    def _launched_ahead(self, guard: StepGuard) -> ScheduledPass | None:
        """The step that was launched ahead, if a request of it still runs."""
        launched, self._next = self._next, None
        if launched is None or all(part.request.has_ended for part in launched.parts):
            return None
        guard.undo_on_failure(launched.step)
        return launched

    def _launch_next(self, guard: StepGuard, launched: ScheduledPass) -> Exception | None:
        """Launch the step after one that was launched, where that may be. Returns why it failed."""
        if not self._may_launch_after(launched):
            return None
        try:
            self._next = self._launch(guard, launched)
        except Exception as error:
            if guard.was_interrupted:
                raise
            return error
        return None

    def _may_launch_after(self, launched: ScheduledPass) -> bool:
        scheduler = self._scheduler
        if not self._always and (not self._cache.memory.in_flight.is_under_way or scheduler.may_prefill):
            return False
        if self._bisector.group is not None:
            return False
        if any(part.samples and part.request.forks for part in launched.parts):
            return False  # the other answers begin with a copy of the state, which the next pass would change
        # drafts follow the last token, which is not there
        return scheduler.drafting is None or not scheduler.drafting.awaits(launched.parts)
