"""The requests of an engine: from when they are queued until their last output is delivered."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from hybrid.cache.cache import HybridCache
from hybrid.engine.config import EngineConfig
from hybrid.engine.request import Request
from hybrid.engine.results import Result
from hybrid.engine.sampler import NO_TOKEN
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.stats import EngineStats, Meter
from hybrid.engine.step import Part
from hybrid.errors import (
    ClosedError,
    HybridError,
    NonFiniteError,
    OwnershipError,
    QueueFullError,
    RequestError,
    SamplingError,
)
from hybrid.interrupts import deferred

log: logging.Logger = logging.getLogger(__name__)

NO_TOKEN_LEFT = "no token can be chosen: the parameters exclude all, or a logits processor gave NaN"

NOT_FINITE = "the model computed NaN or infinity for this request; nothing of the pass was cached"


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


class Requests:
    """The requests of an engine that have not ended, and what becomes of them.

    Args:
        cache: what they share.
        scheduler: has their memory.
        config: limits of the engine.
        end_tokens: tokens that end an answer.

    Attributes:
        by_id: those that wait or run, by id; without replays.
        num_of: the number of them by tenant.
        meter: counts what was delivered.
        is_stepping: a step is under way.
        aborted: those that end after it: aborted meanwhile, by a signal handler or because a stream was collected.
        is_closed: no more are taken.
    """

    def __init__(
        self, cache: HybridCache, scheduler: Scheduler, config: EngineConfig, end_tokens: frozenset[int]
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.num_of: Counter[str] = Counter()
        self.meter: Meter = Meter()
        self.is_stepping: bool = False
        self.aborted: deque[Request] = deque()
        self.is_closed: bool = False
        self._cache = cache
        self._scheduler = scheduler
        self._config = config
        self._end_tokens = end_tokens

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
        with self._cache.bookkeeping():
            if self.is_closed:
                raise ClosedError("this engine was closed")
            try:
                for request in requests:
                    self.by_id[request.request_id] = request
                    self.num_of[request.tenant] += 1
                    self._scheduler.add(request)
            except BaseException:
                for request in requests:
                    self._remove(request.request_id)
                    self._scheduler.discard(request)
                raise

    def _check_room(self, requests: list[Request]) -> None:
        room = self._scheduler.room
        if room is not None and len(requests) > room:
            raise queue_full(self._scheduler.waiting.num_requests, len(requests), self._config)
        for tenant, num_more in Counter(request.tenant for request in requests).items():
            if (refusal := tenant_full(tenant, self.num_of[tenant] + num_more, self._config)) is not None:
                raise refusal

    def _remove(self, request_id: str) -> Request | None:
        """Count a request no more that has ended, or could not be queued. Returns it; None if there is none."""
        request = self.by_id.pop(request_id, None)
        if request is not None:
            self.num_of[request.tenant] -= 1
            if not self.num_of[request.tenant]:
                del self.num_of[request.tenant]
        return request

    # What ends early

    @contextmanager
    def aborting(self, requests: list[Request]) -> Iterator[None]:
        """Abort requests that still run when this is left: by an exception, or because a stream was closed, or
        collected, in whatever thread."""
        try:
            yield
        finally:
            with deferred():
                for request in requests:
                    if request.request_id in self.by_id:
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
        with self._cache.bookkeeping():
            request = self._remove(request_id)
            if request is None:
                raise RequestError(f"no request {request_id!r} is waiting or running")
            self.abort_later(request)
            if not self.is_stepping:
                self.end_aborted()

    def abort_later(self, request: Request) -> None:
        """Stop a request at the end of the next step, if it has not ended then. From any thread."""
        self.aborted.append(request)

    def end_aborted(self) -> None:
        """End the requests that were aborted while a step was under way."""
        while self.aborted:
            request = self.aborted.popleft()
            left = [answer for answer in request.answers if not answer.has_ended]
            for answer in left:
                answer.finish_reason = "abort"
                answer.is_fork = False
            if left:
                self._end(request)
                request.outputs.put(request.source)
            for answer in left:
                self._scheduler.discard(answer)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error."""
        if request.error is not None:
            return
        request.finish_reason = "error"
        if isinstance(error, HybridError):
            request.error, request.error_code = str(error), error.code
        else:
            request.error, request.error_code = f"{type(error).__name__}: {error}", "internal"
        log.warning("%s ends with an error: %s", request.request_id, request.error)
        for fork in request.forks:  # their prompt was not computed
            fork.is_fork, fork.finish_reason = False, "error"
            fork.error, fork.error_code = request.error, request.error_code
        self._end(request)
        request.outputs.put(request.source)
        self._scheduler.discard(request)

    def end_by_form(self, request: Request) -> None:
        """End a request whose form lets nothing follow its answer, or that has waited for its form at its limit."""
        request.end_by_form()
        self._finish(request)
        request.outputs.put(request.source)

    def close(self) -> None:
        """Abort all requests, and give up replays."""
        self.is_closed = True
        self.aborted.extend(self.by_id.values())
        self.end_aborted()
        for replay in [*self._scheduler.running, *self._scheduler.waiting.in_turn(set())]:
            self._scheduler.discard(replay)

    # What a pass yields

    def take(self, part: Part, result: Result) -> None:
        """Append the tokens of a part to its request, up to its end, share what was computed of them, and deliver them.

        Raises:
            NonFiniteError: the result is not finite.
            SamplingError: there is no token.
        """
        request, scheduler = part.request, self._scheduler
        if not result.is_finite:
            raise NonFiniteError(NOT_FINITE)
        if scheduler.drafting is not None:
            scheduler.drafting.accept(part, result.accepted)
        if result.tokens and request.max_len == request.prompt_len:
            request.end_at_prompt()
        for at, token in enumerate(result.tokens):
            if request.finish_reason is not None or (request.constraints is not None and request.is_full):
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
        if result.prompt_logprobs:
            request.add_prompt_logprobs(result.prompt_logprobs, part.end)
        if part.is_alive:  # otherwise it was retracted while it was computed
            scheduler.commit(part, part.end + result.num_more)
        for fork, (token, logprobs) in zip(request.forks, result.forks, strict=True) if result.forks else ():
            self._fork(request, fork, token, logprobs)
        if not result.tokens:
            return
        if request.finish_reason is not None:
            self._finish(request)
        request.outputs.put(request.source)

    def _fork(self, request: Request, fork: Request, token: int, logprobs: dict[int, float] | None) -> None:
        """Start another answer to the prompt of a request, with its first token."""
        fork.is_fork = False
        try:
            if token == NO_TOKEN:
                raise SamplingError(fork.why_no_token or NO_TOKEN_LEFT)
            fork.append(token, logprobs, self._end_tokens)
        except Exception as error:
            self.fail(fork, error)
            return
        self.meter.forked()
        if fork.finish_reason is None:
            self._scheduler.fork(request, fork)
        else:
            self._end(fork)

    def _finish(self, request: Request) -> None:
        """End a request that has its answer."""
        self._scheduler.finish(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        """Record that a request has its finish reason. With several answers it has ended when all of them have."""
        now = time.perf_counter()
        for answer in request.answers:
            if answer.finish_reason is not None and answer.ended_at is None:
                answer.ended_at = now
                if answer.constraints is not None:
                    answer.constraints.end_form()
        if not request.is_replay and all(answer.finish_reason is not None for answer in request.answers):
            self._remove(request.answers[0].request_id)
            self.meter.ended(request.finish_reason or "")
