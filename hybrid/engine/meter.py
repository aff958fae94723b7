"""Counts what an engine delivers. The owner's thread writes; any thread may read."""

from __future__ import annotations

import time
from bisect import bisect_left

from hybrid.engine.request import Request
from hybrid.engine.stats import Histogram

FIRST_TOKEN_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Seconds from arrival to the first token."""

BETWEEN_TOKENS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Seconds between two tokens of an answer."""

WINDOW = 10
"""Seconds over which the current rate is taken."""


class Durations:
    """A histogram that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def histogram(self) -> Histogram:
        """As it is now."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Rate:
    """Events per second over the last `WINDOW` seconds, counted by whole seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (WINDOW + 1)
        self._second = [-1] * (WINDOW + 1)  # what each count is of
        self._began: float | None = None

    def add(self, now: float, count: int) -> None:
        """Count events at a time of `time.perf_counter`."""
        if self._began is None:
            self._began = now
        second = int(now)
        at = second % len(self._counts)
        if self._second[at] != second:
            self._second[at], self._counts[at] = second, 0
        self._counts[at] += count

    def per_second(self, now: float) -> float:
        """Events per second up to a time of `time.perf_counter`."""
        if self._began is None:
            return 0.0
        first = int(now) - WINDOW + 1
        counted = sum(c for second, c in zip(self._second, self._counts, strict=True) if second >= first)
        return counted / max(now - max(self._began, float(first)), 0.001)


class Meter:
    """What an engine has delivered.

    Attributes:
        finished: number of requests by `finish_reason`.
        prompt_tokens: of requests that have their first token.
        completion_tokens: tokens of answers.
        first_token: seconds from arrival to the first token.
        between_tokens: seconds between two tokens of an answer.
        rate: of tokens of answers.
    """

    def __init__(self) -> None:
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.prompt_tokens: int = 0
        self.completion_tokens: int = 0
        self.first_token: Durations = Durations(FIRST_TOKEN_BOUNDS)
        self.between_tokens: Durations = Durations(BETWEEN_TOKENS_BOUNDS)
        self.rate: Rate = Rate()
        self._num_rated = 0

    def delivered(self, request: Request, before: float | None) -> None:
        """A request has another token.

        Args:
            before: when it had the one before; None: it is the first.
        """
        now = request.last_token_at
        assert now is not None
        self.completion_tokens += 1
        if before is None:
            self.prompt_tokens += request.prompt_len
            self.first_token.add(now - request.arrived)
        else:
            self.between_tokens.add(now - before)

    def forked(self) -> None:
        """Another answer to a prompt has its first token: the prompt and the time until then are those of the first
        answer."""
        self.completion_tokens += 1

    def stepped(self) -> None:
        """All tokens of a step were delivered."""
        count = self.completion_tokens - self._num_rated
        if count:
            self.rate.add(time.perf_counter(), count)
            self._num_rated = self.completion_tokens

    def ended(self, reason: str) -> None:
        """A request ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def tokens_per_second(self) -> float:
        """Tokens of answers per second, now."""
        return self.rate.per_second(time.perf_counter())
