"""Requests as they come: by the times of a log, or as many at a time, and each after the answer that its prompt has."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from hybrid.doctor.past import STEP, Fact
from hybrid.doctor.request import LoggedRequest


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
    """

    concurrency: int | None = 1
    prefill_rate: float = PREFILL_RATE
    decode_rate: float = DECODE_RATE

    def __str__(self) -> str:
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
            self._ahead = None
            self._open.add(arrival.number)
            if arrival.follows in self._open:
                self._held.setdefault(arrival.follows, []).append(arrival)
            else:
                self._ready.append(arrival)
        return self._ready[0]

    def take(self) -> ArrivedRequest:
        """Take the request that `peek` has returned: it runs."""
        self._num_running += 1
        return self._ready.popleft()

    def ended(self, arrival: ArrivedRequest) -> None:
        """A request that was taken has its answer."""
        self._num_running -= 1
        self._open.discard(arrival.number)
        self._ready.extend(self._held.pop(arrival.number, ()))

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


def _follows(number: int, request: LoggedRequest, fact: Fact) -> int | None:
    """The number of the request whose prompt this one continues beyond its end: its answer comes first. Prefixes are
    known by steps."""
    if fact.seen and request.num_prompt > fact.answer_from and fact.seen >= fact.answer_from // STEP * STEP:
        return number - fact.age
    return None
