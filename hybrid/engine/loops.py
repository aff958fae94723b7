"""The two loops of an engine: how a step is scheduled, launched, waited for, committed and delivered."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.engine.base_loop import Loop, ScheduledPass
from hybrid.engine.config import EngineConfig
from hybrid.engine.model_runner import Runner
from hybrid.engine.request import Request
from hybrid.engine.requests import Requests
from hybrid.engine.results import Result
from hybrid.engine.scheduler import Scheduler


class PlainLoop(Loop):
    """One step after the other: the specification, whose outputs every loop has."""

    def step(self) -> None:
        """Schedule, plan and launch; wait; commit and deliver."""
        now = self.launch()
        if now is None:
            self.wait_for_requests()
            return
        self.finish(now, self.results(now))

    def forget(self, request: Request | None = None) -> None:
        """Do nothing: nothing is launched ahead."""


class OverlapLoop(Loop):
    """Launches the next step before the results of this one are waited for: its pass takes the tokens on the device.

    Args:
        always: launch ahead in every case. Otherwise only where other threads compute this step, unless the next
            may have prompts, which no other thread computes.
        cache, scheduler, requests, runner, config: those of every loop.
    """

    def __init__(
        self,
        cache: HybridCache,
        scheduler: Scheduler,
        requests: Requests,
        runner: Runner,
        config: EngineConfig,
        *,
        always: bool,
    ) -> None:
        super().__init__(cache, scheduler, requests, runner, config)
        self._always = always
        self._ahead: ScheduledPass | None = None

    def step(self) -> None:
        """Schedule, plan and launch, unless it was launched ahead; launch the next one; wait; commit and deliver."""
        now = self._take_ahead() or self.launch()
        if now is None:
            self.wait_for_requests()
            return
        if self._may_launch_after(now):
            self._ahead = self.launch(after=now)
        results = self.results(now)
        if self._ahead is not None:
            drop_late(self._ahead, now, results, self._scheduler)
        self.finish(now, results)

    def forget(self, request: Request | None = None) -> None:
        """Forget the step that was launched ahead, or the part of a request."""
        if request is None:
            self._ahead = None
        elif self._ahead is not None:
            for part in self._ahead.step.parts:
                part.is_dropped = part.is_dropped or part.request is request

    def _take_ahead(self) -> ScheduledPass | None:
        """Take the step that was launched ahead, if a request of it still runs."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or all(part.is_dropped or part.request.has_ended for part in ahead.step.parts):
            return None
        return ahead

    def _may_launch_after(self, now: ScheduledPass) -> bool:
        """Tell whether the next step may be launched before the results of this one are known."""
        scheduler, parts = self._scheduler, now.step.parts
        if not self._always and (not self._cache.memory.in_flight.is_under_way or scheduler.may_prefill):
            return False
        if self._bisector.group is not None:
            return False
        if not now.step.is_plain and any(part.samples and part.request.forks for part in parts):
            return False  # the other answers begin with a copy of the state, which the next pass would change
        # drafts follow the last token, which is not there
        return scheduler.drafting is None or not scheduler.drafting.awaits(parts)


def drop_late(ahead: ScheduledPass, now: ScheduledPass, results: list[Result], scheduler: Scheduler) -> None:
    """Drop the parts of a step that was launched ahead whose first token the device did not know: they are computed
    again. A request that was retracted meanwhile begins again with tokens that are known."""
    late = {part.request for part, result in zip(now.step.parts, results, strict=True) if result.is_late}
    for part in ahead.step.parts if late else ():
        if part.num_unknown and part.request in late:
            scheduler.retreat(part)
            part.is_dropped = True
