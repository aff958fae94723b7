"""What the mirror has seen and done: counts, a snapshot of them, and a line of a log."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any


class Counts:
    """Counts what the mirror has seen and done.

    Attributes:
        lookups: requests that were looked up.
        differing: those of which vLLM found another length than the tree.
        prompt_tokens, hit_tokens: of those that were given room, and of these what vLLM found.
        refused: states that were not kept, by kind.
        evicted: states that were evicted, by kind.
        evicted_pages: blocks of pages that were evicted.
        set_apart: requests of which nothing more was inserted, for want of free blocks.
        ended_pins: pins that ended before their time, for want of free blocks.
        bad_options: requests with options that are not known or have no such value.
    """

    def __init__(self) -> None:
        self.lookups: int = 0
        self.differing: int = 0
        self.prompt_tokens: int = 0
        self.hit_tokens: int = 0
        self.refused: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        self.evicted_pages: int = 0
        self.set_apart: int = 0
        self.ended_pins: int = 0
        self.bad_options: int = 0

    def checkpoint(self, node: Any) -> None:
        """Count a state that leaves the tree."""
        self.evicted[node.usage.kind.value] += 1

    def pages(self, node: Any, num_kept: int) -> None:
        """Count pages that leave the tree."""
        self.evicted_pages += node.num_pages - num_kept


@dataclass(frozen=True, slots=True)
class MirrorStats:
    """A snapshot.

    Attributes:
        policy: of eviction.
        policy_failure: why the policy was dismissed, and LRU took its place; None: it is in use.
        failure: what has raised in the mirror, and put vLLM's own order back; None: nothing has.
        lookups, differing, prompt_tokens, hit_tokens, refused, evicted, evicted_pages, set_apart,
            ended_pins, bad_options: those of `Counts`.
        lru_hit_tokens: what LRU would have found with the same states, as the guard beside the policy follows it
            (docs/eviction.md); None: the policy has none.
        lru_is_on: LRU was ahead, and has taken over for a while.
        lru_switches: how often it has, and the policy has come back.
        states, pages, pins: what the tree has now.
    """

    policy: str
    policy_failure: str | None
    failure: str | None
    lookups: int
    differing: int
    prompt_tokens: int
    hit_tokens: int
    lru_hit_tokens: int | None
    lru_is_on: bool
    lru_switches: int
    refused: dict[str, int]
    evicted: dict[str, int]
    evicted_pages: int
    set_apart: int
    ended_pins: int
    bad_options: int
    states: int
    pages: int
    pins: int

    @property
    def hit_percent(self) -> float:
        """Tokens of prompts that were found, in percent."""
        return 100 * self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def gained_points(self) -> float | None:
        """Points of the hit rate that were gained over LRU with the same states; None: it is not followed."""
        if self.lru_hit_tokens is None:
            return None
        return 100 * (self.hit_tokens - self.lru_hit_tokens) / max(1, self.prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return asdict(self)

    def line(self) -> str:
        """All of it in a line of a log."""
        gained = f", {self.gained_points:+.1f} points over LRU" if self.gained_points is not None else ""
        parts = [
            f"{self.hit_percent:.1f} % of prompts hit{gained}",
            f"{self.lookups} requests",
            f"{self.states} states and {self.pages} pages cached, {self.pins} pins",
            f"evicted: {_by_kind(self.evicted)} states, {self.evicted_pages} pages",
            f"not kept: {_by_kind(self.refused)} states",
        ]
        if self.lru_is_on:
            parts.append("LRU was ahead and has taken over for a while")
        if self.policy_failure is not None:
            parts.append(f"policy {self.policy} was dismissed for LRU: {self.policy_failure}")
        if self.failure is not None:
            parts.append(f"off since {self.failure}")
        return "; ".join(parts)


def _by_kind(counts: dict[str, int]) -> str:
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(counts.items()))
    return f"{sum(counts.values())} ({kinds})" if kinds else "0"
