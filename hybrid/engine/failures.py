"""Failures of steps: what they undo, and which request is their reason.

A step that fails is undone, and computed again: most failures do not repeat. When it fails again with the same
requests, they are computed in halves, and the half that fails in halves again, until one request is left. That one is
the culprit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, suppress

from hybrid.cache.cache import HybridCache
from hybrid.cache.lease import Lease
from hybrid.engine.request import Request
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.step import Part, Step
from hybrid.errors import REFUSALS, OwnershipError
from hybrid.interrupts import Section, is_for_the_process


class FailureBisector:
    """The requests among which the culprit is looked for.

    A request is suspected until it has been computed beyond where it failed: what a step undid is computed again first,
    token by token in deterministic mode, and such steps prove nothing.
    """

    def __init__(self) -> None:
        self._failed: dict[Request, int] = {}  # with the number of tokens that the failed step would have computed
        self._groups: deque[list[Request]] = deque()

    @property
    def group(self) -> frozenset[Request] | None:
        """The only requests that the next step may compute; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def failed(self, parts: list[Part]) -> Request | None:
        """A step with these parts failed, and was undone. Returns the culprit, once it is found."""
        ends = {part.request: part.end for part in parts if not part.request.has_ended}
        # one that failed earlier than before, while what was undone is computed again, has failed by chance
        common = [request for request, end in ends.items() if end >= self._failed.get(request, end + 1)]
        if self._groups:
            self._groups.popleft()
        if not common:
            self._failed |= {request: max(end, self._failed.get(request, 0)) for request, end in ends.items()}
            return None
        self._failed = {request: ends[request] for request in common}
        if len(ends) == 1:
            return common[0]
        half = len(common) // 2
        self._groups.extendleft(group for group in (common[half:], common[:half]) if group)
        return None

    def passed(self, parts: list[Part]) -> None:
        """A step with these parts was computed. None: those of the group cannot be computed now."""
        for part in parts:
            if part.end >= self._failed.get(part.request, part.end + 1):
                del self._failed[part.request]
        if self._failed:
            self._failed = {request: end for request, end in self._failed.items() if not request.has_ended}
        if not parts and self._groups:
            self._groups.popleft()
        while self._groups and not any(request in self._failed for request in self._groups[0]):
            self._groups.popleft()


class StepGuard:
    """The failures of one step.

    Args:
        interrupts: the section in which signal handlers wait.

    Attributes:
        steps: what is undone when the step fails: the step itself, and the one launched after it.
        failures: requests that failed by themselves, with the exceptions.
    """

    def __init__(self, interrupts: Section) -> None:
        self.steps: list[Step] = []
        self.failures: list[tuple[Request, BaseException]] = []
        self._interrupts = interrupts

    def interruptible(self) -> AbstractContextManager[None]:
        """Let signal handlers run: what they raise undoes the step."""
        return self._interrupts.paused()

    @property
    def was_interrupted(self) -> bool:
        """Whether the step failed because a signal handler raised: no request is the reason."""
        return self._interrupts.was_interrupted

    def undo_on_failure(self, step: Step) -> Step:
        """From now on a failure undoes this step, too."""
        self.steps.append(step)
        return step

    def keep_on_failure(self, step: Step) -> None:
        """The results of this step are there: from now on it is not undone."""
        self.steps.remove(step)

    def failed(self, request: Request, error: BaseException) -> None:
        """What was raised is the failure of this request, which has not ended."""
        self.failures.append((request, error))

    def raise_pending(self) -> None:
        """Raise the first failure that is meant for the process."""
        for _, error in self.failures:
            if is_for_the_process(error):
                raise error


class Recovery:
    """Keeps the cache and the requests of an engine consistent, whatever was raised in between.

    Args:
        cache: what requests share.
        scheduler: the requests that wait and run.
        requests: those of the engine, by id; without replays.
    """

    def __init__(self, cache: HybridCache, scheduler: Scheduler, requests: Mapping[str, Request]) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._requests = requests
        self._pending: BaseException | None = None  # its recovery has not ended: another exception came

    def complete(self) -> bool:
        """End a recovery that another exception broke off. Returns whether the cache was emptied."""
        return self._pending is not None and self.reset_if_inconsistent(self._pending)

    def reset_if_inconsistent(self, error: BaseException) -> bool:
        """Close leases without an owner, empty the cache where its audit fails, and have all requests start again where
        it was emptied. Returns whether it was: now, or by the call that raised.

        Args:
            error: the exception that left bookkeeping. After one that refuses something nothing was changed.
        """
        if isinstance(error, REFUSALS):
            return False
        self._pending = error
        requests = [answer for request in self._requests.values() for answer in request.answers]
        held = {request.lease for request in (*self._scheduler.running, *requests)} - {None}
        was_emptied = False
        with suppress(OwnershipError):
            self._cache.check_owner()
            was_emptied = not self._close_all_but(held) or self._cache.reset_if_inconsistent(error)
            if not was_emptied and not held <= {*self._cache.leases}:  # the call that raised has emptied it
                was_emptied = True
                self._close_all_but(set())
            if was_emptied:
                self._scheduler.start_again(requests)
        self._pending = None
        return was_emptied

    def _close_all_but(self, held: Set[Lease | None]) -> bool:
        """Close the leases without an owner: the exception came before their owners got them, or while they were
        closed. Returns whether that could be done; otherwise the cache is emptied."""
        try:
            for lease in [lease for lease in self._cache.leases if lease not in held]:
                self._cache.close(lease)
        except Exception:
            self._cache.reset()
            return False
        return True
