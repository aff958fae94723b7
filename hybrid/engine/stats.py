"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.speculation.speculator import DrafterStats


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many durations were how long.

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
    """What an engine has done since it was made, and what it does now.

    Attributes:
        waiting: requests that have no memory yet, or had to give it back.
        running: requests with memory.
        restoring: of these, those that compute nothing until copies are read for them from disk.
        replays: answers that wait for their replay, or are replayed (deterministic mode).
        retractions: how often a running request gave its memory back.
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
