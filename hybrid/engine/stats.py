"""Counts of what an engine delivers. The owner's thread writes; any thread may read."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass

from hybrid.engine.request import Request
from hybrid.speculation.speculator import DrafterStats


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of durations.

    Attributes:
        bounds: upper bounds of the buckets, in seconds, ascending; a last bucket has none.
        counts: durations in each bucket, up to its bound and above the one before: one more than there are bounds.
        total: sum of all durations, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean duration, in seconds; None where there is none."""
        count = self.count
        return self.total / count if count else None

    def quantile(self, fraction: float) -> float | None:
        """The duration that this fraction of all does not exceed, interpolated within its bucket; None where there is
        no duration. In the last bucket it is the last bound: the true one is longer."""
        rank, below = fraction * self.count, 0
        if not self.count:
            return None
        for at, (bound, count) in enumerate(zip(self.bounds, self.counts, strict=False)):
            if count and below + count >= rank:
                start = self.bounds[at - 1] if at else 0.0
                return start + (bound - start) * max(0.0, rank - below) / count
            below += count
        return self.bounds[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """The counts of an engine since it was made, and its present state.

    Attributes:
        waiting: requests that have no memory yet, or had to give it back.
        running: requests with memory.
        restoring: of these, those that compute nothing until copies are read for them from disk.
        replays: answers that wait for their replay, or are replayed (deterministic mode).
        retractions: how often a running request gave its memory back: pages ran out, a step failed, the cache was
            emptied, a pass gave NaN, or a form was late. The log says which (`hybrid`, level INFO).
        finished: number of requests that ended, by `finish_reason`.
        prompt_tokens: of the prompts of requests that have their first token.
        completion_tokens: tokens of answers.
        tokens_per_second: tokens of answers in the last 10 seconds, or since the first one where that is less.
        bytes_total: memory for pages and states together; 0 where the cache does not know its units' sizes.
        bytes_free: of these, in no use.
        time_to_first_token: seconds from a request's arrival to its first token.
        time_between_tokens: seconds between two tokens of an answer.
        speculation: what each drafter has done, by its name.
    """

    waiting: int
    running: int
    restoring: int
    replays: int
    retractions: int
    finished: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float
    bytes_total: int
    bytes_free: int
    time_to_first_token: Histogram
    time_between_tokens: Histogram
    speculation: dict[str, DrafterStats]

    @property
    def bytes_used(self) -> int:
        """Memory that holds what is cached, and what requests work on."""
        return self.bytes_total - self.bytes_free


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
        """Return the histogram as it is now."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


class EventRate:
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
    """The counts of what an engine has delivered.

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
        self.rate: EventRate = EventRate()
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
