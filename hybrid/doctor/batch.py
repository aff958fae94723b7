"""Requests at a time on a model of an engine: step by step, as schedulers with continuous batching do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hybrid.doctor.arrivals import Arrivals, ArrivedRequest
from hybrid.doctor.engine import MISS, EngineModel, Hit
from hybrid.doctor.request import LoggedRequest

MAX_WAITING = 64
"""Requests that wait beside those that run; others come when one of them begins."""

BUDGET = 8192
"""Tokens of a step."""


class Begun(NamedTuple):
    """A request that has begun.

    Attributes:
        hit: what of its prompt was cached.
        endless: what would have been with endless memory; `hit` where that is not asked for.
    """

    arrival: ArrivedRequest
    hit: Hit
    endless: Hit


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request that runs, or that has to begin again.

    Attributes:
        arrival: what has come.
        request: what is to be computed: of one that begins again, its prompt ends where it was.
        running: on the engine; twin: on the one with endless memory, if there is one.
        end: tokens that are computed of it in all.
        has_begun: it ran before; has_answer: and had the first token of its answer.
    """

    arrival: ArrivedRequest
    request: LoggedRequest
    running: Any = None
    twin: Any = None
    end: int = 0
    has_begun: bool = False
    has_answer: bool = False

    @property
    def is_prompt(self) -> bool:
        """Its prompt is not computed yet."""
        return bool(self.running.computed < self.request.num_prompt)


class ReplayLoop:
    """The loop of a scheduler: first those that run, then those that wait, first come, first served.

    Where there is no room for an answer, the request that began last gives up all it holds, and begins again.

    Args:
        engine: what requests are served on.
        arrivals: the requests as they come.
        endless: the same engine with endless memory, which follows step by step.
        budget: tokens of a step.
    """

    def __init__(
        self,
        engine: EngineModel,
        arrivals: Arrivals,
        endless: EngineModel | None = None,
        *,
        budget: int = BUDGET,
    ) -> None:
        self._engine, self._arrivals, self._endless = engine, arrivals, endless
        self._budget = budget
        self._running: list[InFlightRequest] = []
        self._waiting: deque[InFlightRequest] = deque()  # those that begin again are the first
        self._is_blocked = False  # one that has come found no room
        self._has_changed = True  # and may find it now
        self._begun: list[Begun] = []
        self._budget_left = self._num_prefilled = 0  # of the step: tokens that it has room for, and those of prompts

    def run(self) -> Iterator[Begun]:
        """Serve all requests; each is given when it begins."""
        while True:
            self._take_arrivals()
            if self._running or self._waiting:
                self._step()
                yield from self._begun
                self._begun.clear()
            elif not self._arrivals.wait():
                return

    def _take_arrivals(self) -> None:
        """Have requests that have come wait."""
        most = self._engine.max_running + MAX_WAITING
        while len(self._running) + len(self._waiting) < most and self._arrivals.peek() is not None:
            arrival = self._arrivals.take()
            request = arrival.request
            end = max(request.num_prompt, request.num_tokens - 1)
            self._waiting.append(InFlightRequest(arrival, request, end=end))

    def _step(self) -> None:
        """One step, or as many as only compute tokens of answers."""
        engine, count, limit = self._engine, *self._num_steps()
        engine.new_step()
        self._budget_left, self._num_prefilled = self._budget, 0
        num_running, is_decoding = len(self._running), False
        planned: list[tuple[InFlightRequest, int]] = []
        for flight in self._running.copy():
            if not self._budget_left or flight not in self._running:
                break
            if flight.is_prompt:
                self._compute_part(flight, planned)
            elif engine.mixes:
                is_decoding = True
                self._budget_left -= 1
                self._plan(flight, flight.running.computed + count, planned)
        if len(self._running) == num_running:
            self._admit(planned)
        if not engine.mixes and not planned:
            is_decoding = True
            planned = [(flight, flight.running.computed + count) for flight in self._running]
        for flight, end in planned:
            if flight in self._running:
                self._advance(flight, end)
        self._has_changed = count == limit or self._num_prefilled > 0 or len(self._running) != num_running
        self._arrivals.passed(self._num_prefilled, count if is_decoding else 0)
        for flight in self._running if self._num_prefilled else ():
            if not flight.has_answer and not flight.is_prompt:
                flight.has_answer = True
                self._arrivals.answers(flight.arrival)
        for flight in [flight for flight in self._running if flight.running.computed >= flight.end]:
            self._end(flight)

    def _num_steps(self) -> tuple[int, int]:
        """How many steps are alike, and after how many something changes in the memory: answers get a token each, and
        none of them takes memory or gives up some, until another request comes."""
        if not self._running or any(flight.is_prompt for flight in self._running):
            return 1, 1
        next_event = self._engine.next_event
        limit = min(min(next_event(each.running), each.end) - each.running.computed for each in self._running)
        if self._is_blocked:
            return (1 if self._has_changed else limit), limit
        return (1 if self._waiting else self._arrivals.steps_until_next(limit)), limit

    def _admit(self, planned: list[tuple[InFlightRequest, int]]) -> None:
        """Begin requests that wait, in order, as long as there is room."""
        self._is_blocked = False
        while self._budget_left and self._waiting:
            flight = self._waiting[0]
            room = len(self._running) < self._engine.max_running
            flight.running = self._engine.begin(flight.request, self._budget_left) if room else None
            if flight.running is None and self._running:
                self._is_blocked = True
                return
            self._waiting.popleft()
            is_first, flight.has_begun = not flight.has_begun, True
            if flight.running is None:  # it has no room even alone
                if is_first:
                    self._begun.append(Begun(flight.arrival, MISS, MISS))
                self._arrivals.ended(flight.arrival)
                continue
            if is_first:
                hit: Hit = flight.running.hit
                if self._endless is not None:
                    flight.twin = self._endless.begin(flight.request)
                self._begun.append(Begun(flight.arrival, hit, flight.twin.hit if flight.twin is not None else hit))
            self._running.append(flight)
            self._compute_part(flight, planned)

    def _compute_part(self, flight: InFlightRequest, planned: list[tuple[InFlightRequest, int]]) -> None:
        """Compute of a prompt what the step has room for."""
        start = flight.running.computed
        end = self._engine.end_of_part(flight.running, self._budget_left)
        if end > start:
            self._budget_left -= end - start
            self._num_prefilled += end - start
            self._plan(flight, end, planned)

    def _plan(self, flight: InFlightRequest, end: int, planned: list[tuple[InFlightRequest, int]]) -> None:
        """Compute a request up to a token: now, or when the step is done."""
        if self._engine.shares_at_once:
            self._advance(flight, end)
        else:
            planned.append((flight, end))

    def _advance(self, flight: InFlightRequest, end: int) -> None:
        """Compute a request up to a token. Where there is no room, those that began last make it."""
        while not self._engine.advance(flight.running, end):
            if len(self._running) == 1:
                flight.end = flight.running.computed  # where there is no room beside its own prompt, the answer ends
                return
            last = self._running.pop()
            self._engine.end(last.running)
            computed = last.running.computed
            last.request = replace(last.request, num_prompt=max(last.request.num_prompt, computed + 1))
            self._waiting.appendleft(last)
            if last is flight:
                return
        if flight.twin is not None and self._endless is not None and end > flight.twin.computed:
            self._endless.advance(flight.twin, end)

    def _end(self, flight: InFlightRequest) -> None:
        self._running.remove(flight)
        self._engine.end(flight.running)
        if flight.twin is not None and self._endless is not None:
            self._endless.end(flight.twin)
        self._arrivals.ended(flight.arrival)
