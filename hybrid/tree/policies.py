"""The policies of eviction, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hybrid.errors import ArgumentError
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.policy import Facts, Policy

Order = Literal["rising", "any"]


class LeastRecentlyUsed:
    """The least recently used goes first."""

    order: Order = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.last_used


class LeastFrequentlyUsed:
    """What was used least often goes first; among equals the least recently used."""

    order: Order = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.hits * 2.0**40 + facts.last_used


class FirstInFirstOut:
    """The oldest goes first."""

    order: Order = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.created


class MostRecentlyUsed:
    """The most recently used goes first."""

    order: Order = "any"

    def rank(self, facts: Facts) -> float:
        return -facts.last_used


class FirstInLastOut:
    """The newest goes first."""

    order: Order = "rising"

    def rank(self, facts: Facts) -> float:
        return -facts.created


class LowestPriority:
    """The lowest priority goes first; among equals the least recently used."""

    order: Order = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.priority * 2.0**40 + facts.last_used


class FlopAware:
    """Recency, and computation saved per byte (after Marconi, MLSys 2025), both relative to the largest seen lately.

    Computation is counted in tokens of the forward pass: those since the next checkpoint above, and attention over what
    lies before them.

    Args:
        alpha: weight of the computation saved per byte against recency.
        attention: what one token of context adds to the cost of a token, relative to the rest of it.
    """

    def __init__(self, alpha: float = 1.0, attention: float = 1e-5) -> None:
        self._alpha = alpha
        self._attention = attention
        self._densest = 1e-30

    def rank(self, facts: Facts) -> float:
        tokens = facts.tokens_saved
        saved = tokens + tokens * self._attention * (facts.num_tokens - tokens / 2)
        density = saved / max(facts.bytes_freed, 1)
        self._densest = max(self._densest, density)
        return 1 / (1 + facts.age) + self._alpha * density / self._densest

    def evicted(self, facts: Facts) -> None:
        """The largest seen fades, so that one giant does not set the scale for ever."""
        self._densest *= 0.99


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "mru": MostRecentlyUsed,
    "filo": FirstInLastOut,
    "priority": LowestPriority,
    "flop_aware": FlopAware,
    "lhd": LearnedHitDensity,
}


def policy_of(eviction: Any) -> Policy:
    """The policy that a user means: one of ours by name, or the user's own object.

    Raises:
        ArgumentError: no policy has that name, or the object has no method `rank`.
    """
    if isinstance(eviction, str):
        if eviction not in POLICIES:
            raise ArgumentError(f"no eviction policy is named {eviction!r}; there are: {', '.join(POLICIES)}")
        return POLICIES[eviction]()
    if isinstance(eviction, type) or not callable(getattr(eviction, "rank", None)):
        raise ArgumentError(
            f"eviction must be the name of a policy, or an object with a method rank(facts) -> float; got {eviction!r}"
        )
    if getattr(eviction, "order", None) not in (None, "rising", "any"):
        raise ArgumentError(f'a policy\'s order is "rising" or "any", or it has none; got {eviction.order!r}')
    policy: Policy = eviction
    return policy
