"""Requests as they come: by the times of a log, as many at a time, or as the answers before them let their clients send
them; and each after the answer that its prompt has."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from hybrid.doctor.past import STEP, Fact
from hybrid.doctor.request import LoggedRequest, Turn
from hybrid.doctor.traffic import Traffic


class ArrivedRequest(NamedTuple):
    """A request that has come.

    Attributes:
        number: of the request, in the order of the traffic.
        request, fact: what it is, and what the traffic says of it.
        follows: number of the request whose answer its prompt has; None: there is none.
    """

    number: int
    request: LoggedRequest
    fact: Fact
    follows: int | None


PREFILL_RATE, DECODE_RATE = 10_000.0, 50.0
"""Tokens of prompts per second, and tokens per second of each answer, where no rates are given."""


class Pace(NamedTuple):
    """How requests come and how fast they are served.

    Attributes:
        concurrency: requests that are in flight at a time; None: they come by their times.
        prefill_rate: tokens of prompts per second.
        decode_rate: tokens per second of each answer.
        users: sessions at a time; the next request of each comes when its answer and its pause are over, and where a
            session ends another begins. None: there is no such wait.
    """

    concurrency: int | None = 1
    prefill_rate: float = PREFILL_RATE
    decode_rate: float = DECODE_RATE
    users: int | None = None

    def arrivals(self, traffic: Traffic, given: Iterable[tuple[LoggedRequest, Fact]]) -> Arrivals:
        """The requests of traffic, as they come by it. `given`: in order, to be iterated where they come in order."""
        return Arrivals(given, self) if self.users is None else SessionArrivals(traffic, self)

    def __str__(self) -> str:
        if self.users is not None:
            rates = f"{self.prefill_rate:,g} tokens of prompts per second and {self.decode_rate:,g} of each answer"
            return f"of {self.users:,} sessions at a time, each after its answer and its pause, served at {rates}"
        if self.concurrency is None:
            rates = f"{self.prefill_rate:,g} tokens of prompts per second and {self.decode_rate:,g} of each answer"
            return f"by their times, served at {rates}"
        return "one after the other" if self.concurrency == 1 else f"{self.concurrency:,} at a time"


class Arrivals:
    """The requests of traffic, and the clock by which they come.

    A prompt that has the answer of another request cannot have come before it: such a request waits, as its client
    would, until the answer is there.

    Args:
        traffic: requests, in order.
        pace: how they come, and how long a step takes.

    Attributes:
        waits: seconds to the first token of each request that has it, in order of these tokens.
    """

    def __init__(self, traffic: Iterable[tuple[LoggedRequest, Fact]], pace: Pace) -> None:
        self._traffic = enumerate(traffic)
        self._pace, self._concurrency = pace, pace.concurrency
        self._ahead: ArrivedRequest | None = None  # the next one that has not come
        self._ready: deque[ArrivedRequest] = deque()
        self._held: dict[int, list[ArrivedRequest]] = {}  # those that wait for an answer, by its number
        self._open: set[int] = set()  # requests that have come, or wait for an answer, and have not ended
        self._num_running = 0
        self._since, self._prefill, self._decode = 0.0, 0, 0  # the time is that, and what was computed since
        self._came: dict[int, float] = {}  # when those that run or wait came
        self.waits: array[float] = array("d")

    @property
    def are_single(self) -> bool:
        """Requests come one after the other."""
        return self._concurrency == 1

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self._since + self._prefill / self._pace.prefill_rate + self._decode / self._pace.decode_rate

    def peek(self) -> ArrivedRequest | None:
        """The next request, if it has come."""
        if self._concurrency is not None and self._num_running >= self._concurrency:
            return None
        while not self._ready:
            arrival = self._look()
            if arrival is None or self._time_of(arrival) > self.now:
                return None
            time = self._time_of(arrival)
            self._pass(arrival)
            self._open.add(arrival.number)
            if arrival.follows in self._open:
                self._held.setdefault(arrival.follows, []).append(arrival)
            else:
                self._come(arrival, time)
        return self._ready[0]

    def take(self) -> ArrivedRequest:
        """Take the request that `peek` has returned: it runs."""
        self._num_running += 1
        arrival = self._ready.popleft()
        self._came[arrival.number] = max(
            self._came[arrival.number], -math.inf if self._concurrency is None else self.now
        )
        return arrival

    def answers(self, arrival: ArrivedRequest) -> None:
        """The first token of an answer is there."""
        self.waits.append(self.now - self._came.pop(arrival.number))

    def ended(self, arrival: ArrivedRequest) -> None:
        """A request that was taken has its answer."""
        self._num_running -= 1
        self._open.discard(arrival.number)
        self._came.pop(arrival.number, None)
        for other in self._held.pop(arrival.number, ()):
            self._come(other, self.now)

    def passed(self, prefill: int, decode: int) -> None:
        """Steps are done.

        Args:
            prefill: tokens of prompts that they computed.
            decode: steps with a token of each answer.
        """
        self._prefill += prefill
        self._decode += decode

    def steps_until_next(self, limit: int) -> int:
        """Steps with a token of each answer, at least 1 and at most `limit`, until another request comes."""
        arrival = self._look()
        if arrival is None or self._ready or (self._concurrency or 0) > self._num_running:
            return limit if arrival is None and not self._ready else 1
        if self._concurrency is not None:
            return limit
        # One less than the estimate, and the rest one by one: sums of floats are compared as `peek` does.
        return max(1, min(limit, math.floor((self._time_of(arrival) - self.now) * self._pace.decode_rate)))

    def wait(self) -> bool:
        """Nothing runs: it is the time of the next request. False: there is none."""
        arrival = self._look()
        if arrival is None:
            return False
        self._since, self._prefill, self._decode = max(self.now, self._time_of(arrival)), 0, 0
        return True

    def _come(self, arrival: ArrivedRequest, time: float) -> None:
        """A request has come."""
        self._came[arrival.number] = time
        self._ready.append(arrival)

    def _pass(self, arrival: ArrivedRequest) -> None:
        """The next request of the traffic is another than this."""
        self._ahead = None

    def _look(self) -> ArrivedRequest | None:
        """The next request of the traffic."""
        if self._ahead is None:
            number, pair = next(self._traffic, (0, None))
            if pair is not None:
                self._ahead = ArrivedRequest(number, *pair, _follows(number, *pair))
        return self._ahead

    def _time_of(self, arrival: ArrivedRequest) -> float:
        """When it comes; where that is not known, after those before it."""
        time = arrival.request.time
        return -math.inf if self._concurrency is not None or time is None else time


class ClosedLoop:
    """Recorded sessions in a closed loop: a request comes after the answers that it waits for, and its pause.

    Args:
        turns: the places of all requests in their sessions.
        users: sessions at a time; where one ends, another begins.

    Attributes:
        due: requests that wait for nothing but a time: a heap of times in seconds, and their numbers.
    """

    def __init__(self, turns: Sequence[Turn], users: int) -> None:
        self.due: list[tuple[float, int]] = []
        self._turns = turns
        self._missing = [len(turn.after) for turn in turns]
        self._followers: dict[int, list[int]] = {}
        self._left = Counter(turn.session for turn in turns)
        self._first: dict[int, list[int]] = {}  # of sessions that have not begun
        for number, turn in enumerate(turns):
            for other in turn.after:
                self._followers.setdefault(other, []).append(number)
            if not turn.after:
                self._first.setdefault(turn.session, []).append(number)
        for _ in range(users):
            self._begin_session(0.0)

    def ended(self, number: int, now: float) -> None:
        """A request has its answer."""
        for other in self._followers.pop(number, ()):
            self._missing[other] -= 1
            if not self._missing[other]:
                heappush(self.due, (now + self._turns[other].pause, other))
        session = self._turns[number].session
        self._left[session] -= 1
        if not self._left[session]:
            self._begin_session(now)

    def _begin_session(self, now: float) -> None:
        if self._first:
            for number in self._first.pop(next(iter(self._first))):
                heappush(self.due, (now, number))


class SessionArrivals(Arrivals):
    """The requests of recorded sessions, as they come in a closed loop.

    Args:
        traffic: of recorded sessions.
        pace: as many users as are there at a time.
    """

    def __init__(self, traffic: Traffic, pace: Pace) -> None:
        super().__init__((), pace)
        self._requests, self._loop = traffic, ClosedLoop(traffic.turns, pace.users or 1)

    def ended(self, arrival: ArrivedRequest) -> None:
        """A request that was taken has its answer: those that waited for it come after their pauses."""
        super().ended(arrival)
        self._loop.ended(arrival.number, self.now)

    def _look(self) -> ArrivedRequest | None:
        if not self._loop.due:
            return None
        number = self._loop.due[0][1]
        if self._ahead is None or self._ahead.number != number:
            self._ahead = ArrivedRequest(number, *self._requests[number], None)
        return self._ahead

    def _pass(self, arrival: ArrivedRequest) -> None:
        heappop(self._loop.due)
        super()._pass(arrival)

    def _time_of(self, arrival: ArrivedRequest) -> float:
        return self._loop.due[0][0]


def _follows(number: int, request: LoggedRequest, fact: Fact) -> int | None:
    """The number of the request whose prompt this one continues beyond its end: its answer comes first. Prefixes are
    known by steps."""
    if fact.seen and request.num_prompt > fact.answer_from and fact.seen >= fact.answer_from // STEP * STEP:
        return number - fact.age
    return None
